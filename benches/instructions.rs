//! Instructions that the gateway needs for a request, counted by valgrind: unlike a time, the same on a busy machine as on a
//! quiet one. Ends with exit code 1 if a way costs more than it may, which is a tenth more than was counted when the limit was set.
//!
//! The whole program runs under callgrind, once with few requests and once with many; the difference, divided by the
//! requests between, is what one costs. What the kernel and the stores do is not in it. Valgrind knows no SHA instructions, so
//! hashing weighs more here than on a machine that has them.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use hapax::db;
use hapax::dev::{Stores, StoresOptions};
use hapax::provider::Scheme;
use hapax::sign::{Draft, fresh_id, sign};
use http::Method;
use jiff::Timestamp;
use rustix::process::{Pid, Signal, kill_process};

const SECRET: &str = "whsec_of_the_bench_only";
const PATH: &str = "/in/bench";
const DATABASE: &str = "instructions";
const BODY_BYTES: usize = 1024;
/// Under valgrind everything takes its time.
const LIMIT: Duration = Duration::from_secs(60);

/// A way of a request through the gateway.
struct Way {
    name: &'static str,
    /// Every request is a new event; otherwise all are one.
    is_new: bool,
    signed: bool,
    /// Instructions for one request.
    most: u64,
}

const WAYS: [Way; 3] = [
    Way { name: "hot", is_new: false, signed: true, most: 130_000 },
    Way { name: "new", is_new: true, signed: true, most: 238_000 },
    Way { name: "refused", is_new: false, signed: false, most: 42_500 },
];

fn main() -> ExitCode {
    // Under `cargo test` it shows only that everything works, and needs no valgrind.
    let measured = std::env::args().any(|argument| argument == "--bench");
    match run(measured) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            writeln!(std::io::stderr(), "instructions: {error:#}").ok();
            ExitCode::FAILURE
        }
    }
}

fn run(measured: bool) -> Result<bool> {
    let stores = Stores::start(&StoresOptions::default())?;
    stores.postgres.create_database(DATABASE)?;
    let bench = Bench { stores, measured };
    bench.prepare()?;
    let (few, many) = if measured { (200, 1_200) } else { (1, 3) };
    let mut within = true;
    for way in &WAYS {
        let (less, more) = (bench.count(way, few)?, bench.count(way, many)?);
        let each = more.saturating_sub(less) / (many - few);
        let verdict = if !measured || each <= way.most { "" } else { "  MORE THAN IT MAY BE" };
        within &= verdict.is_empty();
        let (name, most) = (way.name, way.most);
        writeln!(
            std::io::stdout(),
            "{name:<8} {each:>9} instructions for a request, at most {most}{verdict}"
        )?;
    }
    Ok(within)
}

struct Bench {
    stores: Stores,
    measured: bool,
}

impl Bench {
    fn prepare(&self) -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let config = hapax::config::Config::load(&self.settings("127.0.0.1:0".parse()?)?);
        let config = config.map_err(|problems| anyhow::Error::msg(hapax::config::report(&problems)))?.config;
        runtime.block_on(async {
            let mut database = db::connect(&config.postgres).await?;
            db::migrate(&mut database).await.map(drop)
        })
    }

    fn settings(&self, listen: SocketAddr) -> Result<std::path::PathBuf> {
        let (postgres, redis) = (self.stores.postgres.url(DATABASE), self.stores.redis.url());
        let text = format!(
            r#"
[server]
listen = "{listen}"
[admin]
listen = "127.0.0.1:0"
[log]
requests = "failed"
[postgres]
url = "{postgres}"
[fast_tier]
url = "{redis}"
prefix = "instructions:"
# Under valgrind an answer takes longer to be read than it does to come.
timeout = "2s"
memory_ttl = "5s"
[source.bench]
provider = "stripe"
secrets = ["{SECRET}"]
"#
        );
        // The tag in its name is how the folder's guard finds a gateway that was left behind.
        let path = self.stores.folder().path().join(format!("{}.toml", self.stores.folder().tag()));
        std::fs::write(&path, text)?;
        Ok(path)
    }

    /// Instructions of a gateway from its start to its end, with so many requests between.
    fn count(&self, way: &Way, requests: u64) -> Result<u64> {
        let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let settings = self.settings(listen)?;
        let counted = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("callgrind.{}", way.name));
        let mut gateway = self.start(&settings, &counted)?;
        let sent = send(listen, way, requests);
        let ended = Pid::from_raw(gateway.id().try_into()?).context("a pid")?;
        kill_process(ended, Signal::TERM)?;
        gateway.wait()?;
        sent.with_context(|| way.name)?;
        if self.measured { total(&counted) } else { Ok(0) }
    }

    fn start(&self, settings: &Path, counted: &Path) -> Result<Child> {
        let gateway = env!("CARGO_BIN_EXE_hapax");
        let mut command = if self.measured {
            let mut command = Command::new("valgrind");
            command.args(["--quiet", "--tool=callgrind"]);
            command.arg(format!("--callgrind-out-file={}", counted.display())).arg(gateway);
            command
        } else {
            Command::new(gateway)
        };
        command.arg("serve").arg("--config").arg(settings);
        let log = File::create(self.stores.folder().path().join("gateway.log"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command
            .spawn()
            .with_context(|| format!("{} (apt-get install valgrind)", command.get_program().display()))
    }
}

/// What callgrind counted in all.
fn total(counted: &Path) -> Result<u64> {
    for line in BufReader::new(File::open(counted)?).lines() {
        if let Some(count) = line?.strip_prefix("totals: ") {
            return Ok(count.trim().parse()?);
        }
    }
    bail!("{} has no totals", counted.display())
}

/// One request after the other, on one connection.
fn send(to: SocketAddr, way: &Way, requests: u64) -> Result<()> {
    let scheme = Scheme::preset("stripe").context("stripe")?;
    let key = scheme.key(SECRET).map_err(anyhow::Error::msg)?;
    let mut stream = connect(to)?;
    let mut id = fresh_id();
    // The first opens connections to the stores, whatever the way.
    for number in 0..=requests {
        if way.is_new {
            id = fresh_id();
        }
        let mut body = format!(r#"{{"id":"evt_{id}","type":"a.b","created":1700000000,"data":""#);
        body.push_str(&"x".repeat(BODY_BYTES.saturating_sub(body.len() + 2)));
        body.push_str("\"}");
        let body = body.into();
        let draft = Draft {
            method: &Method::POST,
            public_url: None,
            path: PATH,
            body: &body,
            id: None,
            now: Timestamp::now(),
        };
        let signed = sign(&scheme, &key, &draft).map_err(anyhow::Error::msg)?;
        let mut request =
            format!("POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in &signed.headers {
            let value = value.to_str()?;
            let value =
                if way.signed || number == 0 { value.to_owned() } else { value.replace("v1=", "v1=00") };
            request.extend([name.as_str(), ": ", &value, "\r\n"]);
        }
        request.push_str("\r\n");
        stream.write_all(&[request.as_bytes(), &body].concat())?;
        let status = answer(&mut stream)?;
        let wanted = if way.signed || number == 0 { 200 } else { 401 };
        ensure!(status == wanted, "the answer to request {number} is {status}");
    }
    Ok(())
}

fn connect(to: SocketAddr) -> Result<TcpStream> {
    let since = Instant::now();
    loop {
        match TcpStream::connect(to) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(LIMIT))?;
                return Ok(stream);
            }
            Err(error) => ensure!(since.elapsed() < LIMIT, "the gateway does not listen: {error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The status of the answer, which is read to its end.
fn answer(stream: &mut TcpStream) -> Result<u16> {
    let mut bytes = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let count = stream.read(&mut piece)?;
        ensure!(count > 0, "the gateway hung up");
        bytes.extend_from_slice(piece.get(..count).unwrap_or_default());
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut head = httparse::Response::new(&mut headers);
        let httparse::Status::Complete(length) = head.parse(&bytes)? else { continue };
        let of_body = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
        let of_body = of_body.and_then(|header| str::from_utf8(header.value).ok()?.parse::<usize>().ok());
        if bytes.len() >= length + of_body.unwrap_or(0) {
            return head.code.context("an answer without a status");
        }
    }
}
