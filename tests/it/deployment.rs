//! The files that deploy the gateway, held against each other, the settings and the program: what one of them names
//! exists in the other.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Output};
use std::str::FromStr as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use hapax::config::Config;
use yaml_rust2::{Yaml, YamlLoader};

/// What a person sets who starts it, by the names that the head of the file gives.
const GIVEN: [(&str, &str); 2] = [
    ("POSTGRES_PASSWORD", "a-password"),
    ("WEBHOOKS_SECRET", "whsec_dGhlIHNlY3JldCBvZiB0aGUgdGVzdHMgYWxvbmU="),
];

/// What the images bring that the file may call.
const IMAGES: [(&str, &[&str]); 2] =
    [("postgres", &["pg_isready"]), ("redis", &["redis-server", "redis-cli"])];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(name: &str) -> Result<String> {
    std::fs::read_to_string(root().join(name)).with_context(|| name.to_owned())
}

fn hapax(arguments: &[&str], environment: &BTreeMap<String, String>) -> Result<Output> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hapax"));
    Ok(command.args(arguments).env_clear().envs(environment).current_dir(root()).output()?)
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// An instruction of a Dockerfile.
#[derive(Debug)]
struct Instruction {
    name: String,
    rest: String,
}

impl Instruction {
    fn words(&self) -> impl Iterator<Item = &str> {
        self.rest.split_whitespace()
    }

    /// `--name=value`
    fn flag(&self, name: &str) -> Option<&str> {
        self.words().find_map(|word| word.strip_prefix("--")?.strip_prefix(name)?.strip_prefix('='))
    }

    /// `["a", "b"]`, which needs no shell.
    fn list(&self) -> Result<Vec<String>> {
        let start = self.rest.find('[').with_context(|| format!("{self:?} needs a shell"))?;
        Ok(serde_json::from_str(self.rest.get(start..).unwrap_or_default())?)
    }

    /// What is copied, and where to.
    fn copied(&self) -> Result<(Vec<&str>, &str)> {
        let mut words: Vec<&str> = self.words().filter(|word| !word.starts_with("--")).collect();
        let target = words.pop().context("COPY without a target")?;
        Ok((words, target))
    }
}

/// A Dockerfile: a list of instructions for each stage, the first of which is its FROM.
struct Dockerfile(Vec<Vec<Instruction>>);

impl Dockerfile {
    fn load() -> Result<Self> {
        let text = read("Dockerfile")?.replace("\\\n", " ");
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let mut stages: Vec<Vec<Instruction>> = Vec::new();
        for line in lines {
            let (name, rest) = line.split_once(' ').with_context(|| line.to_owned())?;
            if name == "FROM" {
                stages.push(Vec::new());
            }
            let stage = stages.last_mut().with_context(|| format!("{line} before FROM"))?;
            stage.push(Instruction { name: name.to_owned(), rest: rest.trim().to_owned() });
        }
        ensure!(stages.len() >= 2, "one stage to build in, one to run in");
        Ok(Self(stages))
    }

    fn all<'a>(stage: &'a [Instruction], name: &'static str) -> impl Iterator<Item = &'a Instruction> {
        stage.iter().filter(move |instruction| instruction.name == name)
    }

    fn first(&self) -> &[Instruction] {
        self.0.first().map_or(&[], Vec::as_slice)
    }

    fn last(&self) -> &[Instruction] {
        self.0.last().map_or(&[], Vec::as_slice)
    }

    /// The one that counts, of the stage that runs.
    fn of(&self, name: &'static str) -> Result<&Instruction> {
        Self::all(self.last(), name).last().with_context(|| format!("no {name} in the last stage"))
    }

    fn image(stage: &[Instruction]) -> Result<(&str, &str)> {
        let from = Self::all(stage, "FROM").next().context("FROM")?;
        let image = from.words().next().unwrap_or_default();
        image.split_once(':').with_context(|| format!("{image} names no version"))
    }

    fn environment(&self) -> BTreeMap<String, String> {
        let pairs = Self::all(self.last(), "ENV").flat_map(Instruction::words);
        pairs.filter_map(|pair| pair.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
    }

    /// Paths in the repository that are copied into the stage that builds.
    fn sources(&self) -> Result<Vec<&str>> {
        let copies = Self::all(self.first(), "COPY").map(|copy| Ok(copy.copied()?.0));
        Ok(copies.collect::<Result<Vec<_>>>()?.concat())
    }
}

struct Deployment {
    compose: Yaml,
    docker: Dockerfile,
    /// The gateway's environment.
    environment: BTreeMap<String, String>,
    config: Config,
    /// The variables that the settings read.
    asked: BTreeSet<String>,
}

impl Deployment {
    fn load() -> Result<Self> {
        let compose = compose(&read("docker-compose.yml")?)?;
        let docker = Dockerfile::load()?;
        let mut environment = docker.environment();
        environment.extend(environment_of(&compose["services"]["hapax"])?);
        let asked = std::cell::RefCell::new(BTreeSet::new());
        let loaded = Config::parse("config/compose.toml", &read("config/compose.toml")?, &|name| {
            asked.borrow_mut().insert(name.to_owned());
            environment.get(name).cloned()
        });
        let loaded = loaded.map_err(|problems| anyhow::anyhow!(hapax::config::report(&problems)))?;
        ensure!(loaded.warnings.is_empty(), hapax::config::report(&loaded.warnings));
        Ok(Self { compose, docker, environment, config: loaded.config, asked: asked.into_inner() })
    }

    fn services(&self) -> Result<Vec<(&str, &Yaml)>> {
        entries(&self.compose["services"])
    }

    fn gateway(&self) -> &Yaml {
        &self.compose["services"]["hapax"]
    }

    fn listens(&self) -> [SocketAddr; 2] {
        [self.config.server.listen, self.config.admin.listen]
    }
}

/// The file, with what a person sets put in.
fn compose(text: &str) -> Result<Yaml> {
    let documents = YamlLoader::load_from_str(&put_in(text)?)?;
    ensure!(documents.len() == 1);
    documents.into_iter().next().context("an empty file")
}

/// `${NAME:?message}` is the one form that is used: nothing has a default that somebody could forget to change.
fn put_in(text: &str) -> Result<String> {
    let mut parts = text.split("${");
    let mut done = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (variable, rest) = part.split_once('}').context("a variable without an end")?;
        let name = variable.split_once(":?").with_context(|| format!("{variable} may be left out"))?.0;
        let given = GIVEN.iter().find(|(given, _)| *given == name);
        done += given.with_context(|| format!("nobody knows of {name}"))?.1;
        done += rest;
    }
    Ok(done)
}

fn entries(yaml: &Yaml) -> Result<Vec<(&str, &Yaml)>> {
    let hash = yaml.as_hash().with_context(|| format!("{yaml:?} is no table"))?;
    hash.iter().map(|(name, value)| Ok((name.as_str().context("a name")?, value))).collect()
}

fn strings(yaml: &Yaml) -> Result<Vec<&str>> {
    let list = yaml.as_vec().with_context(|| format!("{yaml:?} is no list"))?;
    list.iter().map(|item| item.as_str().with_context(|| format!("{item:?} is no text"))).collect()
}

fn environment_of(service: &Yaml) -> Result<BTreeMap<String, String>> {
    let pair = |(name, value): (&str, &Yaml)| {
        let value = value.as_str().with_context(|| format!("{name} is no text"))?;
        Ok((name.to_owned(), value.to_owned()))
    };
    match &service["environment"] {
        Yaml::BadValue => Ok(BTreeMap::new()),
        environment => entries(environment)?.into_iter().map(pair).collect(),
    }
}

fn duration(text: &str) -> Result<Duration> {
    let seconds = text.strip_suffix('s').with_context(|| format!("{text} is in no seconds"))?;
    Ok(Duration::from_secs(seconds.parse()?))
}

/// `[address:]published:target`
fn ports(service: &Yaml) -> Result<Vec<(Option<&str>, u16, u16)>> {
    let port = |text: &str| text.parse().with_context(|| text.to_owned());
    let split = |text| {
        let (before, target) = str::rsplit_once(text, ':').with_context(|| text.to_owned())?;
        let (address, published) =
            before.rsplit_once(':').map_or((None, before), |(address, published)| (Some(address), published));
        Ok((address, port(published)?, port(target)?))
    };
    strings(&service["ports"])?.into_iter().map(split).collect()
}

/// Whether the program has this command, and the command knows these flags.
fn assert_known(arguments: &[impl AsRef<str>]) -> Result<()> {
    let arguments: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
    let (command, flags) = arguments.split_first().context("no command")?;
    let help = hapax(&[command, "--help"], &BTreeMap::new())?;
    ensure!(help.status.success(), "hapax {command}: {}", text(&help));
    for flag in flags {
        let known = text(&help).split_whitespace().any(|word| word.trim_end_matches(',') == *flag);
        ensure!(known, "hapax {command} knows no {flag}");
    }
    Ok(())
}

#[test]
fn the_settings_pass_with_the_variables_of_the_gateway() -> Result<()> {
    let deployment = Deployment::load()?;
    let check = hapax(&["check", "--config", "config/compose.toml"], &deployment.environment)?;
    assert!(check.status.success() && check.stderr.is_empty(), "{}", text(&check));
    let mut set: BTreeSet<&str> = deployment.environment.keys().map(String::as_str).collect();
    assert!(set.remove("HAPAX_CONFIG"), "the program reads this one itself");
    let asked: BTreeSet<&str> = deployment.asked.iter().map(String::as_str).collect();
    assert_eq!(set, asked, "set, and read");
    let head = read("docker-compose.yml")?;
    let head = head.split_once("services:").context("services")?.0;
    for (name, _) in GIVEN {
        assert!(head.contains(&format!("#   {name}=")), "the head of the file does not name {name}");
    }
    Ok(())
}

#[test]
fn what_is_mounted_exists_and_is_what_the_program_reads() -> Result<()> {
    let deployment = Deployment::load()?;
    let named: Vec<&str> =
        entries(&deployment.compose["volumes"])?.into_iter().map(|(name, _)| name).collect();
    let mut used = BTreeSet::new();
    for (service, yaml) in deployment.services()? {
        for mount in yaml["volumes"].as_vec().into_iter().flatten().filter_map(Yaml::as_str) {
            let mut parts = mount.split(':');
            let (from, to) = (parts.next().context("from")?, parts.next().context("to")?);
            if !from.starts_with('.') {
                assert!(named.contains(&from), "{service}: volume {from} is not declared");
                used.insert(from);
                continue;
            }
            let file = root().join(from);
            assert!(file.is_file(), "{service}: {from} is no file");
            assert_eq!(service, "hapax", "{mount}");
            assert_eq!(deployment.environment.get("HAPAX_CONFIG").map(String::as_str), Some(to));
            assert_eq!(parts.next(), Some("ro"), "{mount} could be written to");
            assert_eq!(file.canonicalize()?, root().join("config/compose.toml").canonicalize()?);
            // Whoever the image runs as, it owns none of these files.
            assert_eq!(file.metadata()?.permissions().mode() & 0o004, 0o004, "{from} is not for everybody");
            used.insert("the settings");
        }
    }
    assert!(used.remove("the settings"), "the settings are not mounted");
    assert_eq!(used.into_iter().collect::<Vec<_>>(), named, "volumes that are used");
    Ok(())
}

#[test]
fn the_ports_are_those_that_it_listens_on() -> Result<()> {
    let deployment = Deployment::load()?;
    let listens = deployment.listens();
    for listen in listens {
        assert!(listen.ip().is_unspecified(), "{listen} cannot be reached from outside of the container");
    }
    let listened: BTreeSet<u16> = listens.iter().map(SocketAddr::port).collect();
    let published = ports(deployment.gateway())?;
    let targets: BTreeSet<u16> = published.iter().map(|(.., target)| *target).collect();
    assert_eq!(targets, listened, "published, and listened on");
    let exposed = Dockerfile::all(deployment.docker.last(), "EXPOSE").flat_map(Instruction::words);
    let exposed: BTreeSet<u16> = exposed.map(str::parse).collect::<Result<_, _>>()?;
    assert_eq!(exposed, listened, "exposed, and listened on");
    let admin = listens[1].port();
    for (address, port, target) in published {
        assert!(target != admin || address == Some("127.0.0.1"), "operators' port {port} is open to all");
    }
    for store in ["postgres", "redis"] {
        assert!(deployment.compose["services"][store]["ports"].is_badvalue(), "{store} is open to all");
    }
    Ok(())
}

#[test]
fn the_stores_are_those_that_the_file_starts() -> Result<()> {
    let deployment = Deployment::load()?;
    let url = deployment.environment.get("DATABASE_URL").context("DATABASE_URL")?;
    let url = tokio_postgres::Config::from_str(url)?;
    let postgres = environment_of(&deployment.compose["services"]["postgres"])?;
    let of = |name: &str| postgres.get(name).map(String::as_str);
    assert_eq!(url.get_user(), of("POSTGRES_USER"));
    assert_eq!(url.get_dbname(), of("POSTGRES_DB"));
    assert_eq!(url.get_password(), of("POSTGRES_PASSWORD").map(str::as_bytes));
    assert_eq!(url.get_hosts(), [tokio_postgres::config::Host::Tcp("postgres".into())]);
    assert_eq!(url.get_ports(), [5432]);
    let url = deployment.environment.get("REDIS_URL").context("REDIS_URL")?;
    let url = redis::Client::open(url.as_str())?;
    assert_eq!(url.get_connection_info().addr(), &redis::ConnectionAddr::Tcp("redis".into(), 6379));
    Ok(())
}

#[test]
fn the_commands_and_their_flags_exist() -> Result<()> {
    let deployment = Deployment::load()?;
    let installed = deployment.docker.of("COPY")?.copied()?.1;
    assert_eq!(deployment.docker.of("ENTRYPOINT")?.list()?, ["hapax"]);
    assert_eq!(installed, "/usr/local/bin/hapax", "in the search path, by the name that is called");
    assert_known(&deployment.docker.of("CMD")?.list()?)?;
    assert_known(&strings(&deployment.gateway()["command"])?)?;
    let health = deployment.docker.of("HEALTHCHECK")?.list()?;
    let (program, arguments) = health.split_first().context("a program")?;
    assert_eq!(program, "hapax", "the image has nothing else to call");
    assert_known(arguments)?;
    // Its own limit is two seconds.
    let limit = deployment.docker.of("HEALTHCHECK")?.flag("timeout").context("no timeout")?;
    assert!(duration(limit)? > Duration::from_secs(2), "it is killed before it says why");
    Ok(())
}

/// Programs of other people, as far as they can be asked without being started.
#[test]
fn the_commands_of_the_stores_are_understood() -> Result<()> {
    let deployment = Deployment::load()?;
    let services = &deployment.compose["services"];
    let mut redis = strings(&services["redis"]["command"])?.into_iter();
    assert_eq!(redis.next(), Some("redis-server"));
    let output = Command::new("redis-server").args(redis).args(["--port", "0"]).output()?;
    assert!(text(&output).contains("Configured to not listen anywhere"), "{}", text(&output));
    let health = strings(&services["postgres"]["healthcheck"]["test"])?;
    let asked = environment_of(&services["postgres"])?;
    let flags = ["--username", asked["POSTGRES_USER"].as_str(), "--dbname", asked["POSTGRES_DB"].as_str()];
    assert_eq!(health, [&["CMD", "pg_isready"], &flags[..]].concat());
    // 2 is "no answer"; 3 would be "what is that?".
    let output = Command::new("pg_isready").args(flags).args(["--host", "/nowhere"]).output()?;
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    Ok(())
}

#[test]
fn who_is_waited_for_can_be_found_healthy() -> Result<()> {
    let deployment = Deployment::load()?;
    let mut waited_for = BTreeSet::new();
    for (service, yaml) in deployment.services()? {
        if !yaml["depends_on"].is_badvalue() {
            for (other, how) in entries(&yaml["depends_on"])? {
                assert_eq!(how["condition"].as_str(), Some("service_healthy"), "{service}: {other}");
                waited_for.insert(other);
            }
        }
        let Some(image) = yaml["image"].as_str() else { continue };
        let (image, _) = image.split_once(':').with_context(|| format!("{image} names no version"))?;
        let (_, programs) =
            IMAGES.iter().find(|(name, _)| *name == image).with_context(|| image.to_owned())?;
        let test = strings(&yaml["healthcheck"]["test"])?;
        assert_eq!(test.first(), Some(&"CMD"), "{service}");
        assert!(test.get(1).is_some_and(|program| programs.contains(program)), "{service}: {test:?}");
        let of = |name: &str| duration(yaml["healthcheck"][name].as_str().unwrap_or_default());
        assert!(of("interval")? > Duration::ZERO && of("timeout")? > Duration::ZERO);
    }
    assert_eq!(waited_for, BTreeSet::from(["postgres", "redis"]));
    Ok(())
}

#[test]
fn nobody_is_cut_off_while_it_stops() -> Result<()> {
    let deployment = Deployment::load()?;
    let grace = duration(deployment.gateway()["stop_grace_period"].as_str().unwrap_or_default())?;
    // It serves on for so long, then finishes for as long at most.
    assert!(grace > 2 * deployment.config.server.drain, "{grace:?}");
    assert_eq!(deployment.docker.of("STOPSIGNAL")?.rest, "SIGTERM");
    Ok(())
}

#[test]
fn the_image_runs_as_nobody_and_on_the_system_that_it_was_built_on() -> Result<()> {
    let docker = Dockerfile::load()?;
    let user = docker.of("USER")?.rest.split(':').next().unwrap_or_default().to_owned();
    assert!(user.parse::<u32>().is_ok_and(|id| id > 0), "{user} may be root");
    let (built_on, runs_on) = (Dockerfile::image(docker.first())?, Dockerfile::image(docker.last())?);
    assert_eq!((built_on.0, runs_on.0), ("rust", "debian"));
    let (rust, system) = built_on.1.split_once('-').context("the image's system")?;
    assert_eq!(runs_on.1.split('-').next(), Some(system), "another system has another libc");
    let manifest: toml::Table = read("Cargo.toml")?.parse()?;
    let needed = manifest["package"]["rust-version"].as_str().context("rust-version")?;
    let version = |text: &str| text.split('.').map(str::parse).collect::<Result<Vec<u32>, _>>();
    assert!(version(rust)? >= version(needed)?, "Rust {rust} in the image, {needed} is needed");
    Ok(())
}

/// The files that the program takes in when it is compiled.
fn included(folder: &Path, found: &mut BTreeSet<PathBuf>) -> Result<()> {
    for entry in folder.read_dir()? {
        let path = entry?.path();
        if path.is_dir() {
            included(&path, found)?;
            continue;
        }
        let source = std::fs::read_to_string(&path)?;
        // Tests are not built for the image.
        let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for after in source.split("include_str!(").skip(1) {
            let named = after.split('"').nth(1).context("a name")?;
            let mut whole = PathBuf::new();
            for part in folder.strip_prefix(root())?.join(named).components() {
                match part {
                    Component::ParentDir => ensure!(whole.pop(), "{} leaves the repository", path.display()),
                    part => whole.push(part),
                }
            }
            found.insert(whole);
        }
    }
    Ok(())
}

#[test]
fn what_is_copied_exists_and_is_enough_to_build() -> Result<()> {
    let docker = Dockerfile::load()?;
    let sources = docker.sources()?;
    let ignored = read(".dockerignore")?;
    let folder = tempfile::tempdir()?;
    for source in &sources {
        assert!(root().join(source).exists(), "{source} is not in the repository");
        assert!(!ignored.lines().any(|line| line.trim_end_matches('/') == *source), "{source} is ignored");
        std::os::unix::fs::symlink(root().join(source), folder.path().join(source))?;
    }
    let mut files = BTreeSet::new();
    included(&root().join("src"), &mut files)?;
    assert!(files.len() > 3, "{files:?}");
    for file in files {
        assert!(sources.iter().any(|source| file.starts_with(source)), "{} is not copied", file.display());
    }
    // Some versions of cargo build nothing if a target's file is missing, whichever target is asked for.
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version=1"]).current_dir(folder.path());
    let metadata = cargo.output()?;
    assert!(metadata.status.success(), "{}", text(&metadata));
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout)?;
    let targets = metadata["packages"][0]["targets"].as_array().context("targets")?;
    let manifest: toml::Table = read("Cargo.toml")?.parse()?;
    for kind in ["bin", "bench"] {
        for target in manifest[kind].as_array().context("targets")? {
            let name = target["name"].as_str().context("a name")?;
            let found = targets.iter().any(|found| found["name"] == name && found["kind"][0] == kind);
            assert!(found, "{kind} {name} is not copied");
        }
    }
    assert!(sources.contains(&"Cargo.lock"), "the build is --locked");

    let build = Dockerfile::all(docker.first(), "RUN").find(|run| run.rest.contains("cargo build"));
    let build = build.context("no cargo build")?;
    for flag in ["--locked", "--release", "--bin hapax"] {
        assert!(build.rest.contains(flag), "{flag}");
    }
    let home = Dockerfile::all(docker.first(), "WORKDIR").last().context("WORKDIR")?;
    let copy = docker.of("COPY")?;
    assert_eq!(copy.copied()?.0, [format!("{}/target/release/hapax", home.rest)]);
    let stage = Dockerfile::all(docker.first(), "FROM").next().context("FROM")?;
    assert_eq!(copy.flag("from"), stage.words().last());
    Ok(())
}

#[test]
fn the_image_has_the_authorities_that_a_machine_trusts() -> Result<()> {
    const FILE: &str = "/etc/ssl/certs/ca-certificates.crt";
    let docker = Dockerfile::load()?;
    let copies =
        Dockerfile::all(docker.last(), "COPY").map(Instruction::copied).collect::<Result<Vec<_>>>()?;
    assert!(copies.contains(&(vec![FILE], FILE)), "TLS to the stores would trust nobody: {copies:?}");
    Ok(())
}

/// The old program, which Debian has, or the plugin of a newer Docker.
fn docker_compose() -> Result<Command> {
    let answers = |command: &mut Command| command.output().is_ok_and(|output| output.status.success());
    if answers(Command::new("docker-compose").arg("version")) {
        return Ok(Command::new("docker-compose"));
    }
    if answers(Command::new("docker").args(["compose", "version"])) {
        let mut command = Command::new("docker");
        command.arg("compose");
        return Ok(command);
    }
    bail!("no docker-compose on this machine: `make setup-test` installs it")
}

fn compose_config(environment: &[(&str, &str)]) -> Result<Output> {
    let mut command = docker_compose()?;
    for (name, _) in GIVEN {
        command.env_remove(name);
    }
    // A developer's own .env is not part of the repository.
    let nothing = tempfile::NamedTempFile::new()?;
    command.arg("--env-file").arg(nothing.path()).args(["--file", "docker-compose.yml", "config"]);
    Ok(command.envs(environment.iter().copied()).current_dir(root()).output()?)
}

#[test]
fn docker_compose_understands_the_file_as_we_do() -> Result<()> {
    let output = compose_config(&GIVEN)?;
    assert!(output.status.success(), "{}", text(&output));
    let theirs = YamlLoader::load_from_str(&String::from_utf8(output.stdout)?)?;
    let ours = Deployment::load()?;
    for (service, yaml) in ours.services()? {
        let theirs = &theirs[0]["services"][service];
        assert_eq!(environment_of(theirs)?, environment_of(yaml)?, "{service}");
        for part in ["command", "image"] {
            assert_eq!(theirs[part], yaml[part], "{service}");
        }
    }
    for missing in 0..GIVEN.len() {
        let mut given = GIVEN.to_vec();
        let (name, _) = given.remove(missing);
        let output = compose_config(&given)?;
        assert!(
            !output.status.success() && text(&output).contains(&format!("set {name}")),
            "{}",
            text(&output)
        );
    }
    Ok(())
}
