//! `cargo xtask mutants`: bugs of other engines, planted one at a time in a copy of the scheduler;
//! the simulator must catch each of them. Every mutant is a small text file in
//! crates/simulator/mutants.

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Mutex,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use folio_testing::wait;

use crate::process;

/// Runs per mutant, their length, and the time limit: one mutant needs 1,219 runs, which take a
/// busy machine a minute.
const SEEDS: &str = "2000";
const STEPS: &str = "400";
const SECONDS: u64 = 180;
/// A mutant that plans for ever counts as caught.
const HANGS_AFTER: Duration = Duration::from_secs(SECONDS + 60);
/// Copies that are built and run side by side.
const WORKERS: usize = 2;

const PROFILE: &str = "
[profile.dev]
opt-level = 1
debug = false
lto = 'off'
";

/// A bug as a change of text.
struct Mutant {
    name: String,
    /// The engine that had the bug, and its effect.
    peer: String,
    /// In crates/scheduler.
    file: String,
    /// The original text, which occurs exactly once, and its replacement.
    changes: Vec<(String, String)>,
}

impl Mutant {
    fn apply(&self, sound: &str) -> Result<String> {
        let mut text = sound.to_owned();
        for (found, replaced) in &self.changes {
            let times = text.matches(found.as_str()).count();
            ensure!(times == 1, "this text is {times} times in {}, not once:\n{found}", self.file);
            text = text.replace(found.as_str(), replaced);
        }
        ensure!(text != sound, "it changes nothing");
        Ok(text)
    }
}

struct Caught {
    by: String,
    seeds: u64,
    what: String,
}

pub fn run(filter: &[String]) -> Result<()> {
    let mut mutants = read_all()?;
    mutants.retain(|m| filter.is_empty() || filter.contains(&m.name));
    ensure!(!mutants.is_empty(), "no mutant of that name");
    // Mutants of one file are neighbours, so that little is compiled anew between them.
    mutants.sort_by(|a, b| a.file.cmp(&b.file));
    let num = mutants.len();
    let queue = Mutex::new(VecDeque::from(mutants));
    let results = Mutex::new(Vec::new());
    let work = |worker: usize| -> Result<()> {
        let copy = Copy::make(worker)?;
        copy.build().context("the scheduler as it is")?;
        if worker == 0 {
            let sound = copy.simulate("40")?;
            ensure!(sound.is_none(), "the scheduler as it is fails: {}", sound.map(|c| c.what).unwrap_or_default());
        }
        loop {
            let Some(mutant) = queue.lock().expect("no worker panics").pop_front() else { return Ok(()) };
            let outcome = copy.try_mutant(&mutant).with_context(|| format!("mutant {}", mutant.name));
            results.lock().expect("no worker panics").push((mutant, outcome));
        }
    };
    let work = &work;
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS.min(num)).map(|worker| scope.spawn(move || work(worker))).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))
    })?;
    report(results.into_inner().expect("no worker panics"))
}

fn report(mut results: Vec<(Mutant, Result<Option<Caught>>)>) -> Result<()> {
    results.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let width = results.iter().map(|(m, _)| m.name.len()).max().unwrap_or(0);
    let mut wrong = Vec::new();
    println!("{:width$}  {:9}  {:>5}  peer bug", "mutant", "caught by", "seeds");
    for (mutant, outcome) in &results {
        let (by, seeds) = match outcome {
            Ok(Some(caught)) => (caught.by.as_str(), caught.seeds.to_string()),
            Ok(None) => {
                wrong.push(format!("{} survives {SEEDS} seeds or {SECONDS} s of them", mutant.name));
                ("NOTHING", SEEDS.to_owned())
            }
            Err(error) => {
                wrong.push(format!("{error:#}"));
                ("error", "-".to_owned())
            }
        };
        println!("{:width$}  {by:9}  {seeds:>5}  {}", mutant.name, mutant.peer);
    }
    if !wrong.is_empty() {
        bail!("mutants:\n  {}", wrong.join("\n  "));
    }
    println!("all {} mutants caught", results.len());
    Ok(())
}

fn read_all() -> Result<Vec<Mutant>> {
    let folder = process::root().join("crates/simulator/mutants");
    let mut mutants = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let text = fs::read_to_string(&path)?;
        mutants.push(parse(&path, &text).with_context(|| path.display().to_string())?);
    }
    mutants.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(mutants)
}

/// `peer:` and `file:`, then one or more changes: `<<<<`, the original text, `====`, the
/// replacement, `>>>>`.
fn parse(path: &Path, text: &str) -> Result<Mutant> {
    let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let field = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        line.map(|value| value.trim().to_owned()).with_context(|| format!("there is no line {key}"))
    };
    let mut changes = Vec::new();
    let mut rest = text;
    while let Some((_, change)) = rest.split_once("<<<<\n") {
        let (found, replaced) = change.split_once("\n====\n").context("a change without ====")?;
        let (replaced, behind) = replaced.split_once(">>>>").context("a change without >>>>")?;
        changes.push((found.to_owned(), replaced.strip_suffix('\n').unwrap_or(replaced).to_owned()));
        rest = behind;
    }
    ensure!(!changes.is_empty(), "there is no change");
    Ok(Mutant { name, peer: field("peer:")?, file: field("file:")?, changes })
}

/// A copy of the two crates, with a workspace of its own.
struct Copy {
    folder: PathBuf,
}

impl Copy {
    fn make(worker: usize) -> Result<Self> {
        let root = process::root();
        let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
        let folder = root.join(target).join("mutants").join(worker.to_string());
        let manifest = fs::read_to_string(root.join("Cargo.toml"))?;
        let before_profiles = manifest.split("\n[profile.").next().unwrap_or_default();
        let without_default = before_profiles.lines().filter(|line| !line.starts_with("default-members"));
        let manifest: Vec<&str> = without_default
            .map(|line| if line.starts_with("members") { "members = [\"crates/*\"]" } else { line })
            .collect();
        write(&folder.join("Cargo.toml"), &(manifest.join("\n") + PROFILE))?;
        // With the pinned compiler, in any target folder.
        for name in ["Cargo.lock", "rust-toolchain.toml"] {
            write(&folder.join(name), &fs::read_to_string(root.join(name))?)?;
        }
        for name in ["scheduler", "simulator"] {
            let (from, to) = (root.join("crates").join(name), folder.join("crates").join(name));
            let manifest = fs::read_to_string(from.join("Cargo.toml"))?;
            // Tests and benches are left out, and so are their dependencies.
            let manifest = manifest.split("\n[dev-dependencies]").next().unwrap_or_default();
            write(&to.join("Cargo.toml"), &format!("{}\n", manifest.trim_end()))?;
            remove_extra(&from.join("src"), &to.join("src"))?;
            copy_folder(&from.join("src"), &to.join("src"))?;
        }
        Ok(Self { folder })
    }

    fn cargo(&self, args: &[&str]) -> Command {
        let mut cargo = process::cargo(args);
        cargo.current_dir(&self.folder).env("CARGO_TARGET_DIR", self.folder.join("target"));
        // Even if the environment says otherwise: from one mutant to the next nearly everything
        // stays unchanged.
        cargo.env("CARGO_INCREMENTAL", "1");
        cargo
    }

    fn build(&self) -> Result<()> {
        process::output(&mut self.cargo(&["build", "--quiet", "-p", "folio-simulator"])).map(|_| ())
    }

    fn try_mutant(&self, mutant: &Mutant) -> Result<Option<Caught>> {
        let path = self.folder.join("crates/scheduler").join(&mutant.file);
        let sound = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        fs::write(&path, mutant.apply(&sound)?)?;
        let outcome = self.build().and_then(|()| self.simulate(SEEDS));
        fs::write(&path, sound)?;
        outcome
    }

    /// The simulator's violation, if any.
    fn simulate(&self, seeds: &str) -> Result<Option<Caught>> {
        let output = self.folder.join("output.json");
        let mut command = Command::new(self.folder.join("target/debug/folio-simulate"));
        command.args(["--seeds", seeds, "--steps", STEPS, "--threads", "1", "--stop", "--json"]);
        command.args(["--seconds", &SECONDS.to_string()]);
        let mut child = command.stdout(fs::File::create(&output)?).stderr(Stdio::null()).spawn()?;
        let Some(status) = wait::poll(HANGS_AFTER, || child.try_wait().transpose()) else {
            child.kill()?;
            child.wait()?;
            return Ok(Some(Caught { by: "hang".into(), seeds: 0, what: "it never ends".into() }));
        };
        let status = status?;
        if status.success() {
            return Ok(None);
        }
        let text = fs::read_to_string(&output)?;
        let report: serde_json::Value = serde_json::from_str(&text).with_context(|| format!("{status}: {text}"))?;
        let first = &report["failures"][0];
        Ok(Some(Caught {
            by: first["invariant"].as_str().unwrap_or_default().to_owned(),
            seeds: report["seeds"].as_u64().unwrap_or_default(),
            what: first["what"].as_str().unwrap_or_default().to_owned(),
        }))
    }
}

/// Writes only changed files, so that nothing is rebuilt in vain.
fn write(path: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, text).with_context(|| path.display().to_string())
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let target = to.join(path.file_name().context("an entry has a name")?);
        if path.is_dir() {
            copy_folder(&path, &target)?;
        } else {
            write(&target, &fs::read_to_string(&path)?)?;
        }
    }
    Ok(())
}

/// Removes files of an earlier copy that the crate no longer has.
fn remove_extra(from: &Path, to: &Path) -> Result<()> {
    if !to.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(to)? {
        let path = entry?.path();
        let source = from.join(path.file_name().context("an entry has a name")?);
        match (path.is_dir(), source.exists()) {
            (true, true) => remove_extra(&source, &path)?,
            (true, false) => fs::remove_dir_all(&path)?,
            (false, false) => fs::remove_file(&path)?,
            (false, true) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faster than a failing run of the mutants.
    #[test]
    fn every_mutant_fits_the_scheduler_as_it_is() {
        let mutants = read_all().expect("sound files");
        assert!(mutants.len() >= 24, "{} mutants", mutants.len());
        for mutant in mutants {
            let path = process::root().join("crates/scheduler").join(&mutant.file);
            let sound = fs::read_to_string(path).expect("a file of the scheduler");
            mutant.apply(&sound).unwrap_or_else(|error| panic!("{}: {error}", mutant.name));
        }
    }

    #[test]
    fn a_text_that_is_there_twice_or_never_is_refused() {
        let mutant = parse(Path::new("m.txt"), "peer: a\nfile: b\n<<<<\nx\n====\n>>>>\n").expect("sound");
        assert_eq!((mutant.name.as_str(), mutant.peer.as_str(), mutant.file.as_str()), ("m", "a", "b"));
        assert_eq!(mutant.apply("a x b").expect("once"), "a  b");
        assert!(mutant.apply("x x").is_err() && mutant.apply("y").is_err());
    }
}
