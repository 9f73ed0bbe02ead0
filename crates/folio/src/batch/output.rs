//! The output file of a batch: answers, appended one line at a time, and those of earlier runs.
//!
//! Only answers of an earlier run stay. Before the first request, lines with errors are removed, so
//! that their requests are retried and each request has one line at any time. The file is rewritten
//! under another name and renamed over itself: a crash leaves either file, and both have all
//! answers. The file is locked while a run uses it.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Debug, Deserialize, Serialize)]
pub struct Answer {
    id: String,
    custom_id: Option<String>,
    response: Option<Response>,
    error: Option<Fault>,
}

#[derive(Debug, Deserialize, Serialize)]
struct Response {
    status_code: u16,
    request_id: String,
    body: Value,
}

#[derive(Debug, Deserialize, Serialize)]
struct Fault {
    code: String,
    message: String,
}

impl Answer {
    pub fn new(id: String, custom_id: String, status_code: u16, request_id: String, body: Value) -> Self {
        let response = Some(Response { status_code, request_id, body });
        Self { id, custom_id: Some(custom_id), response, error: None }
    }

    /// The line of a request that was not submitted, or got no answer.
    pub fn refused(id: &str, custom_id: Option<String>, code: &str, message: &str) -> Self {
        let error = Some(Fault { code: code.into(), message: message.into() });
        Self { id: id.into(), custom_id, response: None, error }
    }

    /// Whether the request succeeded. The next run retries all others.
    pub fn is_good(&self) -> bool {
        self.response.as_ref().is_some_and(|response| response.status_code == 200)
    }

    /// Tokens of the prompt and of the answer, under either route's names.
    pub fn usage(&self) -> (u64, u64) {
        let usage = self.response.as_ref().map(|response| &response.body["usage"]).unwrap_or(&Value::Null);
        let count = |names: [&str; 2]| names.iter().find_map(|name| usage[*name].as_u64()).unwrap_or(0);
        (count(["prompt_tokens", "input_tokens"]), count(["completion_tokens", "output_tokens"]))
    }
}

pub struct Output {
    file: File,
    path: PathBuf,
    /// The custom_ids of requests with an answer.
    answered: HashSet<String>,
    /// Whether there are lines beside the first answer to each request.
    is_stale: bool,
    /// The file before it was replaced. Its lock keeps out processes that opened it earlier.
    replaced: Option<File>,
}

impl Output {
    /// Opens or creates the file, and locks it. An incomplete last line is cut off.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(path).with_context(|| format!("could not continue {}", path.display()))
    }

    fn read(path: &Path) -> Result<Self> {
        let file = open_locked(path)?;
        let (mut answered, mut is_stale) = (HashSet::new(), false);
        // Devices and pipes have no earlier answers.
        if file.metadata()?.is_file() {
            let mut lines = Lines::of(&file)?;
            while let Some(answer) = lines.next()? {
                match answer.custom_id.filter(|_| answer.is_good) {
                    Some(custom_id) => is_stale |= !answered.insert(custom_id),
                    None => is_stale = true,
                }
            }
            if file.metadata()?.len() > lines.end {
                file.set_len(lines.end)?;
            }
        }
        Ok(Self { file, path: path.to_path_buf(), answered, is_stale, replaced: None })
    }

    /// Removes lines that are not answers, since their requests are about to be retried.
    pub fn keep_answers(&mut self) -> Result<()> {
        if self.is_stale {
            let kept = keep_answers(&self.file, &self.path).context("could not remove the failed lines")?;
            self.replaced = Some(std::mem::replace(&mut self.file, kept));
            self.is_stale = false;
        }
        Ok(())
    }

    pub fn has(&self, custom_id: &str) -> bool {
        self.answered.contains(custom_id)
    }

    /// Appends a line in one write, so that only a crash of the machine can leave half a line.
    pub fn append(&mut self, answer: &Answer) -> Result<()> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        self.file.write_all(&line).with_context(|| format!("could not write {}", self.path.display()))
    }
}

/// Opens and locks the file at `path`. Opens it again if another run replaced it before the lock
/// was held.
fn open_locked(path: &Path) -> Result<File> {
    loop {
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        if !file.metadata()?.is_file() {
            return Ok(file);
        }
        lock(&file)?;
        if is_at(&file, path)? {
            return Ok(file);
        }
    }
}

fn lock(file: &File) -> Result<()> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            bail!("another `folio batch` is writing to it; wait for that to end, or give another file with -o")
        }
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => Ok(()),
        Err(TryLockError::Error(error)) => Err(error).context("could not lock it"),
    }
}

#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let about = file.metadata()?;
    match std::fs::metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (about.dev(), about.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// On other systems an open file cannot be replaced.
#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> Result<bool> {
    Ok(true)
}

/// Replaces `file` by a copy that has only the first answer to each request.
fn keep_answers(file: &File, path: &Path) -> Result<File> {
    // A link is followed to its file.
    let place = path.canonicalize()?;
    let mut name = place.file_name().map_or_else(OsString::new, OsString::from);
    name.push(".folio-tmp");
    let beside = place.with_file_name(name);
    let copy = OpenOptions::new().read(true).append(true).create(true).open(&beside);
    let copy = copy.with_context(|| beside.display().to_string())?;
    lock(&copy)?;
    copy.set_len(0)?;
    copy.set_permissions(file.metadata()?.permissions())?;
    let (mut writer, mut kept) = (BufWriter::new(&copy), HashSet::new());
    let mut lines = Lines::of(file)?;
    while let Some(answer) = lines.next()? {
        if answer.custom_id.filter(|_| answer.is_good).is_some_and(|custom_id| kept.insert(custom_id)) {
            writer.write_all(&lines.line)?;
        }
    }
    writer.flush()?;
    drop(writer);
    copy.sync_all()?;
    std::fs::rename(&beside, &place).with_context(|| format!("{} to {}", beside.display(), place.display()))?;
    Ok(copy)
}

/// Whole lines of an output, from its beginning.
struct Lines<'a> {
    reader: BufReader<&'a File>,
    line: Vec<u8>,
    number: usize,
    /// Offset of the end of the last whole line.
    end: u64,
}

struct Found {
    custom_id: Option<String>,
    is_good: bool,
}

impl<'a> Lines<'a> {
    fn of(mut file: &'a File) -> Result<Self> {
        file.seek(SeekFrom::Start(0))?;
        Ok(Self { reader: BufReader::new(file), line: Vec::new(), number: 0, end: 0 })
    }

    fn next(&mut self) -> Result<Option<Found>> {
        self.line.clear();
        self.reader.read_until(b'\n', &mut self.line)?;
        let Some(text) = self.line.strip_suffix(b"\n") else { return Ok(None) };
        self.number += 1;
        let Ok(answer) = serde_json::from_slice::<Answer>(text) else {
            bail!("line {} is not an answer of a batch; give another file with -o", self.number);
        };
        self.end += self.line.len() as u64;
        Ok(Some(Found { is_good: answer.is_good(), custom_id: answer.custom_id }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(number: usize, custom_id: &str, status: u16) -> Answer {
        let body = serde_json::json!({"usage": {"input_tokens": 3, "output_tokens": 4}});
        Answer::new(format!("batch_req_{number}"), custom_id.into(), status, "r".into(), body)
    }

    fn refused(number: usize, custom_id: Option<&str>) -> Answer {
        Answer::refused(&format!("batch_req_{number}"), custom_id.map(str::to_string), "invalid_line", "w")
    }

    fn bytes(answers: &[Answer]) -> Vec<u8> {
        answers.iter().flat_map(|answer| [serde_json::to_vec(answer).expect("JSON"), b"\n".to_vec()].concat()).collect()
    }

    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("folio-batch-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("the folder can be made");
        folder.join("out.jsonl")
    }

    #[test]
    fn answers_stay_and_everything_else_goes() {
        let path = scratch("output");
        assert_eq!(answer(1, "a", 200).usage(), (3, 4));
        let half = b"{\"id\":\"batch_req_9\",\"custom_id\":\"z".to_vec();
        let good = || bytes(&[answer(1, "a", 200), answer(2, "b", 200)]);
        let table = [
            ("nothing", vec![], vec![]),
            ("answers", good(), good()),
            ("half a line", [good(), half.clone()].concat(), good()),
            ("failures", bytes(&[answer(3, "c", 500), answer(1, "a", 200), answer(2, "b", 200)]), good()),
            ("no requests", [good(), bytes(&[refused(3, None), refused(4, Some("a"))])].concat(), good()),
            ("answers twice", [good(), good()].concat(), good()),
            ("a failure and half a line", [bytes(&[answer(3, "c", 429)]), good(), half].concat(), good()),
        ];
        for (what, left, expect) in table {
            std::fs::write(&path, left).expect("writable");
            let mut output = Output::open(&path).expect(what);
            output.keep_answers().expect(what);
            assert_eq!(std::fs::read(&path).expect("readable"), expect, "{what}");
            assert_eq!((output.has("a"), output.has("c")), (!expect.is_empty(), false), "{what}");
            output.append(&answer(3, "c", 200)).expect("written");
            let after = [expect, bytes(&[answer(3, "c", 200)])].concat();
            assert_eq!(std::fs::read(&path).expect("readable"), after, "{what}");
            assert_eq!(std::fs::read_dir(path.parent().expect("a folder")).expect("readable").count(), 1, "{what}");
        }
        std::fs::write(&path, "something else\n").expect("writable");
        assert!(Output::open(&path).is_err(), "a file of something else is not added to");
        assert_eq!(std::fs::read(&path).expect("readable"), b"something else\n");
    }

    #[test]
    fn a_run_has_the_file_alone() {
        let path = scratch("locked");
        // Both files are locked: the replaced one and the new one.
        for left in [vec![], bytes(&[answer(1, "a", 500)])] {
            std::fs::write(&path, left).expect("writable");
            let before = File::open(&path).expect("it is there");
            let mut first = Output::open(&path).expect("the first run");
            first.keep_answers().expect("writable");
            let error = Output::open(&path).err().map(|error| format!("{error:#}")).expect("the second is refused");
            assert!(error.contains("another `folio batch`") && error.contains("out.jsonl"), "{error}");
            assert!(before.try_lock().is_err(), "a process that opened the replaced file is kept out too");
            drop(first);
            Output::open(&path).expect("a later run");
        }
    }
}
