//! A server under test: started on a free port, killed when the test is done with it.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc;

use serde_json::Value;

use crate::folio;
use crate::http::request;

pub struct Server {
    pub child: Child,
    pub port: u16,
    /// What it said before it was ready, line by line.
    pub greeting: Vec<String>,
    rest: mpsc::Receiver<String>,
}

impl Server {
    pub fn start(flags: &[&str]) -> Self {
        let mut child = folio(&[&["serve", "--port", "0"], flags].concat())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut lines = BufReader::new(child.stderr.take().expect("stderr")).lines().map_while(Result::ok);
        let mut greeting = Vec::new();
        let ready = lines.find_map(|line| {
            let port = line.split_once("http://127.0.0.1:").and_then(|(_, port)| port.trim().parse().ok());
            greeting.push(line);
            port
        });
        let Some(port) = ready else { panic!("the server does not say where it listens: {greeting:#?}") };
        // Whatever else it says must not block it.
        let (said, rest) = mpsc::channel();
        std::thread::spawn(move || lines.for_each(|line| drop(said.send(line))));
        Self { child, port, greeting, rest }
    }

    pub fn post(&self, path: &str, body: Value) -> (u16, Value) {
        let answer = request(self.port, "POST", path, &body.to_string());
        (answer.status, serde_json::from_str(&answer.body).unwrap_or(Value::String(answer.body)))
    }

    /// Ends it at once, without a chance to tidy up; what it said since it was ready.
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
