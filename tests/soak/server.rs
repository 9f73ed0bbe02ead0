//! The server under test: a separate process, seen from outside only.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use folio_testing::{http::exchange, wait};

/// Lines of its log that are stored for diagnosis.
const LINES_KEPT: usize = 60;

pub struct Server {
    child: Child,
    pub port: u16,
    log: Arc<Mutex<VecDeque<String>>>,
}

/// The binary: `FOLIO_BIN`, or the one built with this test.
pub fn folio(args: &[&str]) -> Command {
    let binary = std::env::var_os("FOLIO_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_folio").into());
    let mut command = Command::new(binary);
    command.args(args).stdin(Stdio::null());
    command
}

/// `FOLIO_SOAK_MODEL`; `built-in` is the binary's own. By default the smallest model, because most
/// checks do not depend on the model, and ten times as many requests fit.
fn model() -> Option<OsString> {
    let small = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/folio-rust-7m.gguf").into_os_string();
    let model = std::env::var_os("FOLIO_SOAK_MODEL").unwrap_or_else(small);
    (model != "built-in").then_some(model)
}

impl Server {
    /// Returns once it is ready.
    pub fn start(flags: &[&str]) -> Self {
        let mut child = folio(&[&["serve", "--port", "0"], flags].concat())
            .args(model())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines().map_while(Result::ok);
        let log = Arc::new(Mutex::new(VecDeque::new()));
        let port = lines.by_ref().find_map(|line| {
            let port = port_in(&line);
            log.lock().expect("no panic").push_back(line);
            port
        });
        let Some(port) = port else { panic!("the server does not say where it listens: {log:#?}") };
        // Further output must not block it.
        let kept = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines {
                let mut kept = kept.lock().expect("no panic");
                kept.push_back(line);
                if kept.len() > LINES_KEPT {
                    kept.pop_front();
                }
            }
        });
        let server = Self { child, port, log };
        let is_ready = || matches!(server.get("/health"), Ok((200, _))).then_some(());
        let ready = wait::poll(Duration::from_secs(120), is_ready);
        assert!(ready.is_some(), "the server does not become ready: {:#?}", server.log());
        server
    }

    pub fn log(&self) -> Vec<String> {
        self.log.lock().expect("no panic").iter().cloned().collect()
    }

    pub fn get(&self, path: &str) -> std::io::Result<(u16, String)> {
        get(self.port, path)
    }

    pub fn metrics(&self) -> Metrics {
        let (status, text) = self.get("/metrics").expect("/metrics answers");
        assert_eq!(status, 200, "{text}");
        Metrics::parse(&text)
    }

    pub fn process(&self) -> Process {
        Process(self.child.id())
    }

    /// Without `libc`, which this crate does not need otherwise.
    pub fn terminate(&self) {
        let line = format!("kill -TERM {}", self.child.id());
        let status = Command::new("sh").args(["-c", &line]).stderr(Stdio::null()).status().expect("there is a shell");
        assert!(status.success(), "the server has ended before it was told to: {:#?}", self.log());
    }

    /// Exit status; none if it still runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    pub fn wait(&mut self, within: Duration) -> Option<ExitStatus> {
        wait::poll(within, || self.ended())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One request on its own connection.
pub fn get(port: u16, path: &str) -> std::io::Result<(u16, String)> {
    let reply = exchange(port, "GET", path, "", b"")?;
    Ok((reply.status, reply.text()))
}

fn port_in(line: &str) -> Option<u16> {
    let (_, after) = line.split_once("http://127.0.0.1:")?;
    after.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Samples of `/metrics`, with their labels.
pub struct Metrics(HashMap<String, f64>);

impl Metrics {
    fn parse(text: &str) -> Self {
        let sample = |line: &str| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series.to_string(), value.parse().ok()?))
        };
        Self(text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect())
    }

    /// Sum of all series of this name; none if there are none.
    pub fn sum(&self, name: &str) -> Option<f64> {
        let of_name =
            |series: &str| series.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'));
        let values: Vec<f64> = self.0.iter().filter(|(series, _)| of_name(series)).map(|(_, value)| *value).collect();
        (!values.is_empty()).then(|| values.iter().sum())
    }

    pub fn get(&self, name: &str) -> f64 {
        self.sum(name).unwrap_or_else(|| panic!("/metrics has no {name}"))
    }
}

/// A process as the system describes it.
#[derive(Clone, Copy)]
pub struct Process(u32);

impl Process {
    /// Memory that no file backs, resident or swapped out, in KiB.
    pub fn anonymous_kib(self) -> Option<u64> {
        Some(self.status("RssAnon")? + self.status("VmSwap").unwrap_or(0))
    }

    pub fn threads(self) -> u64 {
        self.status("Threads").unwrap_or(0)
    }

    pub fn files(self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.0)).map_or(0, Iterator::count)
    }

    fn status(self, name: &str) -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.0)).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse().ok()
    }
}

/// A figure of `folio plan` with these flags.
pub fn planned(flags: &[&str], path: &str) -> u64 {
    let output = folio(&[&["plan", "--json"], flags].concat()).args(model()).output().expect("the binary starts");
    let plan: Value = serde_json::from_slice(&output.stdout).expect("the plan is JSON");
    plan.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("the plan does not tell {path}: {plan}"))
}
