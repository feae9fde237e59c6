//! What this program does when it started itself: one role per process, so that its cost can be told.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::{batches, load, receiver, report};

/// A role, and what it needs to know.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Answers requests until it is killed.
    Receiver(receiver::Spec),
    /// Sends requests, reports on standard output.
    Load(load::Spec),
    /// Writes batches without a server in between, reports on standard output.
    Batches(batches::Spec),
}

/// The argument on the command line.
#[derive(Debug, Serialize, Deserialize)]
struct Call<R> {
    /// By this word the guard of the stores' folder knows its processes, and ends those that are left.
    tag: String,
    role: R,
}

impl Role {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let call: Call<Self> = serde_json::from_str(text).context("--role")?;
        Ok(call.role)
    }

    /// Does it.
    pub(crate) async fn play(self) -> Result<()> {
        match self {
            Self::Receiver(spec) => receiver::serve(spec).await,
            Self::Load(spec) => report::say(&serde_json::to_string(&load::run(&spec)?)?),
            Self::Batches(spec) => report::say(&serde_json::to_string(&batches::run(&spec).await?)?),
        }
    }

    /// The command that starts it.
    pub(crate) fn command(&self, tag: &str) -> Result<Command> {
        let call = Call { tag: tag.to_owned(), role: self };
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--role").arg(serde_json::to_string(&call)?).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs it to its end in a process of its own, for its report.
    pub(crate) fn run_for_report(&self, tag: &str) -> Result<load::Report> {
        let output = self.command(tag)?.stderr(Stdio::inherit()).output()?;
        anyhow::ensure!(output.status.success(), "a load generator ended with {}", output.status);
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}
