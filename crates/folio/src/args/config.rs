//! A configuration file: flags under their long names, one per line, as TOML.
//!
//! Entries of the file become flags in front of those of the command line, unless the command line
//! or the environment sets the same flag. So the parser that checks a flag checks a file's value.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::parser::ValueSource;
use clap::{Arg, Command, CommandFactory};
use toml::Value;

use super::{Folio, vllm};

/// The command that reads a configuration, and spells flags as vLLM does.
const COMMAND: &str = "serve";
/// The one key that is not a flag.
const MODEL: &str = "model";
const VARIABLE: &str = "FOLIO_CONFIG";
/// Far more than all flags take.
const FILE_BYTES_MOST: u64 = 1 << 20;

/// The command line for clap, with the flags of the configuration file.
pub fn command_line(given: impl Iterator<Item = OsString>) -> Result<Vec<OsString>> {
    let mut words: Vec<OsString> = given.collect();
    if words.get(1).is_none_or(|name| name != COMMAND) {
        return Ok(words);
    }
    words[2..].iter_mut().for_each(respell);
    let Some((path, from)) = config_path(&words) else { return Ok(words) };
    let text = read(&path).with_context(|| format!("{from} {}", path.display()))?;
    let command = built();
    let file = File { path: &path, command: &command };
    let added = file.flags(&text, &given_ids(&command, &words))?;
    words.splice(2..2, added);
    Ok(words)
}

/// The command with its groups filled.
fn built() -> Command {
    let mut folio = Folio::command();
    folio.build();
    folio.find_subcommand(COMMAND).unwrap_or_else(|| unreachable!("it is a command")).clone()
}

/// Spells a flag as clap knows it: vLLM takes `--max_model_len` for `--max-model-len`, and has
/// short flags of two letters.
fn respell(word: &mut OsString) {
    let Some(text) = word.to_str() else { return };
    if let Some((_, long)) = vllm::SHORT.iter().find(|(short, _)| *short == text) {
        *word = long.into();
    } else if let Some(flag) = text.strip_prefix("--") {
        let (name, value) = flag.split_at(flag.find('=').unwrap_or(flag.len()));
        *word = format!("--{}{value}", name.replace('_', "-")).into();
    }
}

fn config_path(words: &[OsString]) -> Option<(PathBuf, &'static str)> {
    let mut words = words.iter().skip(2);
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("--config") => return words.next().map(|path| (path.into(), "--config")),
            Some(text) if text.starts_with("--config=") => return Some((text["--config=".len()..].into(), "--config")),
            _ => {}
        }
    }
    std::env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(|path| (path.into(), VARIABLE))
}

fn read(path: &Path) -> Result<String> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)?.take(FILE_BYTES_MOST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MOST {
        bail!("larger than {FILE_BYTES_MOST} bytes");
    }
    Ok(text)
}

/// Ids of the flags that the command line or the environment sets, and of flags that they exclude.
fn given_ids(command: &Command, words: &[OsString]) -> HashSet<String> {
    let mut given = HashSet::new();
    let flags = words.iter().skip(2).filter_map(|word| word.to_str()?.strip_prefix("--"));
    let by_name = flags.filter_map(|flag| find(command, flag.split('=').next().unwrap_or(flag)));
    let by_variable =
        command.get_arguments().filter(|arg| arg.get_env().is_some_and(|name| std::env::var_os(name).is_some()));
    for arg in by_name.chain(by_variable) {
        given.insert(arg.get_id().to_string());
        let groups = command.get_groups().filter(|group| group.get_args().any(|id| id == arg.get_id()));
        // The group that clap makes of a struct holds all its flags, and excludes none.
        let exclusive = groups.cloned().filter_map(|mut group| (!group.is_multiple()).then_some(group));
        for group in exclusive {
            given.extend(group.get_args().map(ToString::to_string));
        }
        given.extend(command.get_arg_conflicts_with(arg).iter().map(|other| other.get_id().to_string()));
    }
    // Only clap knows which word is no flag's value.
    let matches = command.clone().ignore_errors(true).try_get_matches_from(&words[1..]);
    if matches.is_ok_and(|matches| matches.value_source(MODEL) == Some(ValueSource::CommandLine)) {
        given.insert(MODEL.into());
    }
    given
}

fn find<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| {
        arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
    })
}

struct File<'a> {
    path: &'a Path,
    command: &'a Command,
}

impl File<'_> {
    /// The file's flags, without those that are in `given`.
    fn flags(&self, text: &str, given: &HashSet<String>) -> Result<Vec<OsString>> {
        let table: toml::Table = toml::from_str(text).with_context(|| self.path.display().to_string())?;
        let mut flags = Vec::new();
        for (key, value) in &table {
            let wrong = || format!("{}: {key}", self.path.display());
            let words = match key == MODEL {
                true => vec![scalar(value).with_context(wrong)?.into()],
                false => self.words(key, value).with_context(wrong)?,
            };
            let id = self.arg(key).map_or(MODEL, |arg| arg.get_id().as_str());
            if !given.contains(id) {
                flags.extend(words);
            }
        }
        Ok(flags)
    }

    fn arg(&self, key: &str) -> Option<&Arg> {
        let name = key.replace('_', "-");
        find(self.command, &name).filter(|_| name != "config" && name != "help" && name != "version")
    }

    /// The words of a command line for one entry; each value is checked.
    fn words(&self, key: &str, value: &Value) -> Result<Vec<OsString>> {
        let Some(arg) = self.arg(key) else {
            bail!("no such flag{}", self.nearest(key));
        };
        let long = format!("--{}", arg.get_long().unwrap_or_default());
        let takes_value = arg.get_action().takes_values();
        let words = match value {
            Value::Boolean(on) if !takes_value => {
                if *on {
                    vec![long]
                } else {
                    Vec::new()
                }
            }
            _ if !takes_value => bail!("expected true or false, found {}", value.type_str()),
            Value::Array(values) => {
                let one = |value| Ok(format!("{long}={}", scalar(value)?));
                values.iter().map(one).collect::<Result<_>>()?
            }
            value => vec![format!("{long}={}", scalar(value)?)],
        };
        self.check(&words)?;
        Ok(words.into_iter().map(Into::into).collect())
    }

    /// Checks the values by themselves. Flags that they require are checked with the whole line.
    fn check(&self, words: &[String]) -> Result<()> {
        use clap::error::ErrorKind::{
            InvalidValue, TooManyValues, UnknownArgument, ValueValidation, WrongNumberOfValues,
        };
        let line = std::iter::once("folio").chain(words.iter().map(String::as_str));
        match self.command.clone().try_get_matches_from(line) {
            Err(error)
                if matches!(
                    error.kind(),
                    InvalidValue | ValueValidation | UnknownArgument | TooManyValues | WrongNumberOfValues
                ) =>
            {
                let text = error.to_string();
                let first = text.lines().next().unwrap_or_default();
                bail!("{}", first.strip_prefix("error: ").unwrap_or(first))
            }
            _ => Ok(()),
        }
    }

    fn nearest(&self, key: &str) -> String {
        let known = self.command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(Arg::get_long);
        let name = key.replace('_', "-");
        let best = known.map(|known| (distance(&name, known), known)).min();
        match best {
            Some((distance, known)) if distance <= 1 + name.len() / 3 => format!("; did you mean {known}?"),
            _ => "; see `folio serve --help`".into(),
        }
    }
}

fn scalar(value: &Value) -> Result<String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        other => bail!("expected a string or a number, found {}", other.type_str()),
    }
}

/// Edit distance: letters to add, drop or change to turn one string into the other.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &b) in other.iter().enumerate() {
            let changed = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Command as Kind, ServeArgs};

    /// The arguments of `serve` from a file's text and a command line.
    fn parse(file: &str, line: &str) -> Result<ServeArgs> {
        let serve = built();
        let words = ["folio", "serve"].into_iter().chain(line.split_whitespace());
        let mut words: Vec<OsString> = words.map(Into::into).collect();
        words[2..].iter_mut().for_each(respell);
        let given = given_ids(&serve, &words);
        let added = File { path: Path::new("f.toml"), command: &serve }.flags(file, &given)?;
        words.splice(2..2, added);
        match Folio::try_parse_from(words)?.command {
            Kind::Serve(args) => Ok(*args),
            _ => bail!("not serve"),
        }
    }

    fn refusal(file: &str) -> String {
        format!("{:#}", parse(file, "").err().unwrap_or_else(|| panic!("{file} was taken")))
    }

    #[test]
    fn the_command_line_wins_and_the_rest_comes_from_the_file() {
        let file = "port = 9000\nmax_num_seqs = 8\nmemory = \"6GiB\"\nfit = true\ninsecure-no-auth = false\n\
                    served-model-name = [\"a\", \"b\"]\ndrain-timeout = 2.5\nssl-certfile = \"c\"\ntls-key = \"k\"\n";
        let args = parse(file, "--port 9001 some/model").expect("a sound file");
        assert_eq!((args.listen.port, args.model.engine.max_num_seqs), (9001, Some(8)));
        assert_eq!(args.naming.served_model_name, ["a", "b"]);
        assert_eq!(args.timeouts.drain_timeout.0.as_millis(), 2500);
        assert_eq!(args.listen.tls_cert.as_deref(), Some(Path::new("c")));
        assert_eq!(args.model.model.as_deref(), Some("some/model"));
        assert!(args.model.engine.memory.fit && !args.access.insecure_no_auth);
        let model = |line| parse("model = \"here\"", line).expect("a sound file").model.model;
        assert_eq!((model("").as_deref(), model("--port 1 there").as_deref()), (Some("here"), Some("there")));
        // The command line overrides flags of the file that it excludes.
        let args = parse(file, "--kv-cache-mib 64").expect("the command line overrides memory");
        assert!(args.model.engine.memory.memory.is_none());
    }

    #[test]
    fn what_is_wrong_names_file_and_key() {
        let check = |file: &str, parts: &[&str]| {
            let text = refusal(file);
            for part in ["f.toml"].iter().chain(parts) {
                assert!(text.contains(part), "{part} in {text}");
            }
        };
        check("prot = 1", &["prot", "did you mean port?"]);
        check("xyzzy = 1", &["xyzzy", "no such flag"]);
        check("port = \"many\"", &["port", "many"]);
        check("port = 99999", &["port", "99999"]);
        check("fit = 3", &["fit", "true or false"]);
        check("max-n = 0", &["max-n"]);
        check("tensor-parallel-size = 2", &["tensor-parallel-size", "only 1"]);
        check("[limits]\nmax-n = 1", &["limits", "no such flag"]);
        check("port = {a = 1}", &["port", "table"]);
        check("config = \"other\"", &["config"]);
        check("port 1", &["f.toml"]);
    }

    #[test]
    fn flags_may_be_spelt_as_vllm_spells_them() {
        let args = parse("", "-tp 1 --max_num_seqs=3 --host=0.0.0.0").expect("known flags");
        assert_eq!(args.model.engine.max_num_seqs, Some(3));
        assert_eq!(args.vllm.notes.len(), 1);
    }

    #[test]
    fn distances() {
        for (one, other, expect) in [("", "", 0), ("port", "prot", 2), ("host", "hosts", 1), ("abc", "xyz", 3)] {
            assert_eq!(distance(one, other), expect, "{one} {other}");
        }
    }
}
