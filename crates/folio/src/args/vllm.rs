//! Flags of `vllm serve` that have no effect in Folio, or only one supported value. They are
//! accepted with a note each, so that a command line can be carried over. Other values are refused
//! by name.

use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// A note about each flag that was given.
#[derive(Clone, Debug, Default)]
pub struct VllmArgs {
    pub notes: Vec<String>,
}

struct Row {
    flag: &'static str,
    alias: Option<&'static str>,
    takes: Takes,
    note: &'static str,
}

#[derive(Clone, Copy)]
enum Takes {
    Nothing,
    /// A flag that Folio does not support.
    Never,
    Number,
    OneOf(&'static [&'static str]),
}

use Takes::{Never, Nothing, Number, OneOf};

const fn row(flag: &'static str, takes: Takes, note: &'static str) -> Row {
    Row { flag, alias: None, takes, note }
}

const fn also(flag: &'static str, alias: &'static str, takes: Takes, note: &'static str) -> Row {
    Row { flag, alias: Some(alias), takes, note }
}

const ONE: Takes = OneOf(&["1"]);
const ONE_PROCESS: &str = "one process runs the whole model";

/// Two-letter flags of vLLM, which clap cannot read.
pub const SHORT: &[(&str, &str)] =
    &[("-tp", "--tensor-parallel-size"), ("-pp", "--pipeline-parallel-size"), ("-dp", "--data-parallel-size")];

const ROWS: &[Row] = &[
    row("tensor-parallel-size", ONE, ONE_PROCESS),
    row("pipeline-parallel-size", ONE, ONE_PROCESS),
    row("data-parallel-size", ONE, ONE_PROCESS),
    row("distributed-executor-backend", OneOf(&["uni"]), ONE_PROCESS),
    row("disable-custom-all-reduce", Nothing, ONE_PROCESS),
    row("enable-chunked-prefill", Nothing, "prompts are always computed in chunks"),
    row("no-enable-chunked-prefill", Never, "prompts are always computed in chunks; raise --max-num-batched-tokens"),
    row("enable-prefix-caching", Nothing, "on unless --no-enable-prefix-caching"),
    row("async-scheduling", Nothing, "on unless --no-async-scheduling"),
    row("trust-remote-code", Nothing, "code in a model's folder is never run"),
    row("disable-log-stats", Nothing, "statistics are at /metrics, not in the log"),
    row("disable-uvicorn-access-log", Nothing, "see --disable-log-requests"),
    row("uvicorn-log-level", OneOf(&["debug", "info", "warning", "error", "critical", "trace"]), "see --log-level"),
    row("swap-space", Number, "there is no swap space; see --kv-host-mib"),
    row("block-size", OneOf(&["16"]), "blocks have 16 tokens"),
    row("seed", Number, "seeds are set per request"),
    row("tokenizer-mode", OneOf(&["auto", "hf"]), "there is one tokenizer"),
    row("scheduling-policy", OneOf(&["fcfs", "priority"]), "requests run in order of arrival and by priority"),
    row("response-role", OneOf(&["assistant"]), "answers have the role assistant"),
    row("root-path", OneOf(&[""]), "routes begin at /"),
    also(
        "max-seq-len-to-capture",
        "max-seq-len-to-capture-tokens",
        Number,
        "sizes of captured graphs are not configurable",
    ),
];

impl Row {
    fn arg(&self) -> Arg {
        let arg = Arg::new(self.flag).long(self.flag).hide(true);
        let arg = match self.alias {
            Some(alias) => arg.alias(alias),
            None => arg,
        };
        match self.takes {
            Nothing | Never => arg.action(ArgAction::SetTrue),
            Number | OneOf(_) => arg.action(ArgAction::Set).value_name("VALUE").value_parser(self.parser()),
        }
    }

    fn parser(&self) -> impl Fn(&str) -> Result<String, String> + Clone + Send + Sync + 'static {
        let (takes, note) = (self.takes, self.note);
        move |text: &str| match takes {
            Number if text.parse::<f64>().is_err() => Err("expected a number".into()),
            OneOf(values) if !values.contains(&text) => {
                let values: Vec<_> = values.iter().map(|value| if value.is_empty() { "\"\"" } else { value }).collect();
                Err(format!("only {} is supported: {note}", values.join(" or ")))
            }
            _ => Ok(text.to_string()),
        }
    }
}

impl Args for VllmArgs {
    fn augment_args(command: Command) -> Command {
        command.args(ROWS.iter().map(Row::arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for VllmArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let given = |row: &&Row| matches.value_source(row.flag) == Some(ValueSource::CommandLine);
        let mut notes = Vec::new();
        for row in ROWS.iter().filter(given) {
            if matches!(row.takes, Never) {
                let message = format!("--{} is not supported: {}\n", row.flag, row.note);
                return Err(clap::Error::raw(ErrorKind::ArgumentConflict, message));
            }
            notes.push(format!("--{} has no effect: {}", row.flag, row.note));
        }
        Ok(Self { notes })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        vllm: VllmArgs,
    }

    fn parse(line: &str) -> Result<Vec<String>, String> {
        let words = std::iter::once("folio").chain(line.split(' ').filter(|word| !word.is_empty()));
        Only::try_parse_from(words).map(|only| only.vllm.notes).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_true_is_taken_with_a_note_each() {
        assert_eq!(parse("").expect("nothing"), Vec::<String>::new());
        let line = "--tensor-parallel-size 1 --swap-space 4 --block-size 16 --seed 0";
        let notes = parse(line).expect("all of it is true");
        assert_eq!(notes.len(), 4);
        for flag in line.split(' ').filter(|word| word.starts_with("--")) {
            assert_eq!(notes.iter().filter(|note| note.starts_with(&format!("{flag} "))).count(), 1, "{flag}");
        }
        parse("--root-path=").expect("no root path");
    }

    #[test]
    fn what_is_not_true_is_refused_by_name() {
        for (line, flag) in [
            ("--tensor-parallel-size 2", "--tensor-parallel-size"),
            ("--block-size 32", "--block-size"),
            ("--root-path /api", "--root-path"),
            ("--swap-space lots", "--swap-space"),
            ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(flag), "{line}: {error}");
        }
        assert!(parse("--tensor-parallel-size 2").expect_err("two").contains("only 1 is supported: one process"));
    }
}
