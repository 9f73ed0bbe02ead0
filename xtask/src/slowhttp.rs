//! `cargo xtask slowhttp`: a thousand connections of slowhttptest in each of its four modes; the
//! server's health checks must still succeed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use folio_measure::stats::percentile;
use folio_testing::http::{Connection, request};
use folio_testing::wait;

use crate::process;
use crate::soak::numbers;

const HELP: &str = "\
cargo xtask slowhttp [--connections 1000] [--seconds 25]

Needs slowhttptest: apt-get install slowhttptest. FOLIO_BIN names another binary to test.";

/// Longest time of a health check.
const MOST: Duration = Duration::from_secs(1);
const EVERY: Duration = Duration::from_millis(100);

pub fn run(args: &[String]) -> Result<()> {
    let [connections, seconds] = numbers(args, HELP, [("--connections", 1000), ("--seconds", 25)])?;
    install()?;
    let server = Server::start(&binary()?)?;
    let address = format!("http://127.0.0.1:{}", server.port);
    let (connections, seconds) = (connections.to_string(), seconds.to_string());
    let common = ["-c", connections.as_str(), "-r", "200", "-l", seconds.as_str(), "-p", "5"];
    // The longest answer that costs nothing, and a route that waits for a body.
    let (document, post) = (format!("{address}/openapi.json"), format!("{address}/v1/completions"));
    let modes: [(&str, Vec<&str>); 4] = [
        ("slow headers", vec!["-H", "-i", "5", "-u", &document]),
        ("slow body", vec!["-B", "-i", "5", "-s", "8192", "-f", "application/json", "-u", &post]),
        ("range", vec!["-R", "-a", "10", "-b", "3000", "-u", &document]),
        ("slow read", vec!["-X", "-w", "512", "-y", "1024", "-n", "5", "-z", "32", "-k", "3", "-u", &document]),
    ];
    let folder = process::root().join("target").join("slowhttp");
    std::fs::create_dir_all(&folder)?;
    println!(
        "{:<14}{:>8}{:>12}{:>12}{:>10}{:>10}{:>10}{:>8}",
        "mode", "checks", "p50", "p99", "most", "connected", "closed", "served"
    );
    let mut wrong = Vec::new();
    for (name, flags) in modes {
        let prefix = folder.join(name.replace(' ', "-"));
        let mode = attack(&server, &[&common[..], &flags[..]].concat(), &prefix)?;
        println!("{}", mode.line(name));
        wrong.extend(mode.wrong(name));
    }
    if !wrong.is_empty() {
        bail!("slowhttptest harms the server:\n  {}", wrong.join("\n  "));
    }
    Ok(())
}

/// Results of one mode, and the server's health meanwhile.
struct Mode {
    checks: Vec<Duration>,
    failures: Vec<String>,
    counts: Counts,
}

/// Counts from the tool's own table, by the second.
#[derive(Default)]
struct Counts {
    most_connected: u64,
    closed: u64,
    seconds: u64,
    /// Seconds in which the tool's own probe was answered.
    seconds_served: u64,
}

fn attack(server: &Server, flags: &[&str], prefix: &Path) -> Result<Mode> {
    let log = std::fs::File::create(prefix.with_extension("log"))?;
    let mut tool = Command::new("slowhttptest")
        .args(flags)
        .args(["-g", "-o"])
        .arg(prefix)
        .stdout(log)
        .stderr(Stdio::null())
        .spawn()
        .context("could not start slowhttptest")?;
    let is_over = AtomicBool::new(false);
    let (checks, failures) = std::thread::scope(|scope| -> Result<_> {
        let health = scope.spawn(|| watch(server.port, &is_over));
        let status = tool.wait();
        is_over.store(true, Ordering::Relaxed);
        let seen = health.join().expect("health checks do not panic");
        status.context("slowhttptest did not end")?;
        Ok(seen)
    })?;
    let table = prefix.with_extension("csv");
    let table = std::fs::read_to_string(&table).with_context(|| format!("slowhttptest left no {}", table.display()))?;
    Ok(Mode { checks, failures, counts: Counts::parse(&table) })
}

impl Counts {
    /// Seconds,Closed,Pending,Connected,Service Available
    fn parse(table: &str) -> Self {
        let mut counts = Self::default();
        for line in table.lines().skip(1) {
            let numbers: Vec<u64> = line.split(',').filter_map(|number| number.trim().parse().ok()).collect();
            let &[_, closed, _, connected, served] = &numbers[..] else { continue };
            counts.most_connected = counts.most_connected.max(connected);
            counts.closed = counts.closed.max(closed);
            counts.seconds += 1;
            counts.seconds_served += u64::from(served > 0);
        }
        counts
    }
}

impl Mode {
    fn line(&self, name: &str) -> String {
        let at = |percent| percentile(&self.checks, percent).unwrap_or_default();
        let ms = |percent| format!("{:.1} ms", at(percent).as_secs_f64() * 1e3);
        let Counts { most_connected, closed, seconds, seconds_served } = self.counts;
        let (p50, p99, most, served) = (ms(50.0), ms(99.0), ms(100.0), format!("{seconds_served}/{seconds}"));
        let checks = self.checks.len();
        format!("{name:<14}{checks:>8}{p50:>12}{p99:>12}{most:>10}{most_connected:>10}{closed:>10}{served:>8}")
    }

    fn wrong(&self, name: &str) -> Vec<String> {
        let mut wrong: Vec<String> = self.failures.iter().map(|failure| format!("{name}: {failure}")).collect();
        let slow = self.checks.iter().filter(|time| **time > MOST).count();
        if slow > 0 {
            let longest = self.checks.iter().max().copied().unwrap_or_default();
            wrong.push(format!("{name}: {slow} health checks took more than {MOST:?}, the longest {longest:?}"));
        }
        let tried = self.counts.most_connected + self.counts.closed;
        if tried < 500 {
            wrong.push(format!("{name}: only {tried} connections were opened: nothing was tried"));
        }
        wrong
    }
}

fn watch(port: u16, is_over: &AtomicBool) -> (Vec<Duration>, Vec<String>) {
    let (mut times, mut failures) = (Vec::new(), Vec::new());
    while !is_over.load(Ordering::Relaxed) {
        let start = Instant::now();
        match health(port) {
            Ok(()) => times.push(start.elapsed()),
            Err(error) => failures.push(format!("a health check failed after {:?}: {error:#}", start.elapsed())),
        }
        std::thread::sleep(EVERY.saturating_sub(start.elapsed()));
    }
    (times, failures)
}

fn health(port: u16) -> Result<()> {
    let mut connection = Connection::open(port)?;
    connection.stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    connection.send(&request("GET", "/health", "", b""))?;
    let reply = connection.reply()?;
    if reply.status != 200 {
        bail!("answered {:?}", reply.head.lines().next().unwrap_or_default());
    }
    Ok(())
}

/// Installs Debian's package if permitted.
fn install() -> Result<()> {
    let is_there =
        || Command::new("slowhttptest").arg("-h").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if is_there() {
        return Ok(());
    }
    let user = process::output(&mut process::command("id", &["-u"])).unwrap_or_default();
    if user.trim() != "0" {
        bail!("slowhttptest is missing: sudo apt-get install slowhttptest");
    }
    process::run(&mut process::command("apt-get", &["install", "-y", "-q", "slowhttptest"]))?;
    if !is_there() {
        bail!("slowhttptest is still missing after apt-get has installed it");
    }
    Ok(())
}

/// `FOLIO_BIN`, or the release build.
fn binary() -> Result<PathBuf> {
    if let Some(binary) = std::env::var_os("FOLIO_BIN") {
        return Ok(binary.into());
    }
    process::run(&mut process::cargo(&["build", "--release", "-p", "folio"]))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| process::root().join("target"), PathBuf::from);
    Ok(target.join("release").join("folio"))
}

struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(binary: &Path) -> Result<Self> {
        let mut child = Command::new(binary)
            .args(["serve", "--port", "0"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("could not start {}", binary.display()))?;
        let mut lines = BufReader::new(child.stderr.take().expect("stderr is piped")).lines().map_while(Result::ok);
        let port = lines.find_map(|line| {
            let (_, after) = line.split_once("http://127.0.0.1:")?;
            after.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        });
        // Further output must not block it.
        std::thread::spawn(move || lines.for_each(drop));
        let server = Self { child, port: port.context("the server does not say where it listens")? };
        let ready = wait::poll(wait::SOON, || health(server.port).ok());
        ready.context("the server does not become ready")?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
