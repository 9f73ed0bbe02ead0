//! Answers of a batch, appended a line at a time, and what an earlier run has left.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Codes of lines that were no requests.
const REFUSALS: [&str; 2] = ["invalid_line", "duplicate_custom_id"];

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

    /// A line that was not asked, or got no answer.
    pub fn refused(id: &str, custom_id: Option<String>, code: &str, message: &str) -> Self {
        let error = Some(Fault { code: code.into(), message: message.into() });
        Self { id: id.into(), custom_id, response: None, error }
    }

    pub fn status(&self) -> Option<u16> {
        self.response.as_ref().map(|response| response.status_code)
    }

    /// Tokens of the prompt and of the answer, by whichever names the route has for them.
    pub fn usage(&self) -> (u64, u64) {
        let usage = self.response.as_ref().map(|response| &response.body["usage"]).unwrap_or(&Value::Null);
        let count = |names: [&str; 2]| names.iter().find_map(|name| usage[*name].as_u64()).unwrap_or(0);
        (count(["prompt_tokens", "input_tokens"]), count(["completion_tokens", "output_tokens"]))
    }
}

pub struct Output {
    file: File,
    path: PathBuf,
    /// What has an answer, by custom_id.
    answered: HashSet<String>,
    /// Lines that are no requests and were said to be none, by id.
    refused: HashSet<String>,
}

impl Output {
    /// Opens or makes the file. A half-written last line is cut off.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(path).with_context(|| format!("could not go on with {}", path.display()))
    }

    fn read(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let (mut answered, mut refused) = (HashSet::new(), HashSet::new());
        let mut reader = BufReader::new(file.try_clone()?);
        let (mut line, mut whole, mut number) = (Vec::new(), 0, 0);
        while reader.read_until(b'\n', &mut line)? > 0 {
            number += 1;
            let Some(text) = line.strip_suffix(b"\n") else { break };
            let Ok(answer) = serde_json::from_slice::<Answer>(text) else {
                bail!("line {number} is no answer of a batch; give another file with -o");
            };
            match (&answer.error, answer.custom_id) {
                (Some(error), _) if REFUSALS.contains(&error.code.as_str()) => drop(refused.insert(answer.id)),
                (_, Some(custom_id)) => drop(answered.insert(custom_id)),
                (_, None) => {}
            }
            whole += line.len() as u64;
            line.clear();
        }
        let mut file = file;
        if file.metadata()?.len() > whole {
            file.set_len(whole)?;
        }
        file.seek(SeekFrom::End(0))?;
        Ok(Self { file, path: path.to_path_buf(), answered, refused })
    }

    pub fn has(&self, custom_id: &str) -> bool {
        self.answered.contains(custom_id)
    }

    pub fn has_refused(&self, id: &str) -> bool {
        self.refused.contains(id)
    }

    /// In one write, so that only the machine's own end can leave half a line.
    pub fn append(&mut self, answer: &Answer) -> Result<()> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        self.file.write_all(&line).with_context(|| format!("could not write {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_known_and_half_a_line_is_cut_off() {
        let path = std::env::temp_dir().join(format!("folio-batch-output-{}", std::process::id()));
        let body = serde_json::json!({"usage": {"input_tokens": 3, "output_tokens": 4}});
        let answer = Answer::new("batch_req_1".into(), "a".into(), 200, "r".into(), body);
        assert_eq!(answer.usage(), (3, 4));
        let mut output = Output::open(&path).expect("a new file");
        output.append(&answer).expect("written");
        output.append(&Answer::refused("batch_req_2", Some("b".into()), "duplicate_custom_id", "w")).expect("written");
        let whole = std::fs::read(&path).expect("readable");
        std::fs::write(&path, [&whole[..], b"{\"id\":\"batch_req_3\",\"custom_id\":\"c"].concat()).expect("writable");
        let mut output = Output::open(&path).expect("an old file");
        assert!(output.has("a") && !output.has("b") && !output.has("c"));
        assert!(output.has_refused("batch_req_2") && !output.has_refused("batch_req_1"));
        assert_eq!(std::fs::read(&path).expect("readable"), whole);
        output.append(&Answer::refused("batch_req_3", None, "invalid_line", "w")).expect("written");
        assert_eq!(std::fs::read_to_string(&path).expect("readable").lines().count(), 3);
        std::fs::write(&path, "something else\n").expect("writable");
        assert!(Output::open(&path).is_err(), "a file of something else is not added to");
        std::fs::remove_file(&path).expect("it is there");
    }
}
