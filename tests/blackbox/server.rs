//! A server under test: started on a free port, killed when the test is done with it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;

use folio_testing::wait::until_some;
use serde_json::Value;

use crate::folio;
use crate::http::request;

pub struct Server {
    pub child: Child,
    pub port: u16,
    /// Its output before it was ready, line by line.
    pub greeting: Vec<String>,
    rest: mpsc::Receiver<String>,
}

impl Server {
    pub fn start(flags: &[&str]) -> Self {
        Self::start_as(folio(&[&["serve", "--port", "0"], flags].concat()))
    }

    /// The same with a prepared command, for example with other environment variables.
    pub fn start_as(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the binary starts");
        let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines().map_while(Result::ok);
        let mut greeting = Vec::new();
        let ready = lines.find_map(|line| {
            let url = line.split_once("ready at http").and_then(|(_, url)| url.split_once("://127.0.0.1:"));
            let port = url.and_then(|(_, port)| port.trim().parse().ok());
            greeting.push(line);
            port
        });
        let Some(port) = ready else { panic!("the server does not say where it listens: {greeting:#?}") };
        // Further output must not block it.
        let (said, rest) = mpsc::channel();
        std::thread::spawn(move || lines.for_each(|line| drop(said.send(line))));
        Self { child, port, greeting, rest }
    }

    pub fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let answer = request(self.port, "POST", path, &body.to_string());
        (answer.status, serde_json::from_str(&answer.body).unwrap_or(Value::String(answer.body)))
    }

    /// Memory that no file backs, in KiB.
    #[cfg(target_os = "linux")]
    pub fn anonymous_kib(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("the server runs");
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("what it holds");
        line.trim().trim_end_matches("kB").trim().parse().expect("a number")
    }

    #[cfg(unix)]
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }

    /// Exit status when it ends by itself.
    pub fn wait(&mut self) -> ExitStatus {
        until_some("the server ends", || self.child.try_wait().expect("it can be waited for"))
    }

    /// Kills it, without a chance to tidy up; returns its output since it was ready.
    pub fn kill(mut self) -> Vec<String> {
        self.child.kill().expect("it was running");
        self.child.wait().expect("it ends");
        self.rest.iter().collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
