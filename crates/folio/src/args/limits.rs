//! Flags of limits and timeouts: one for every field of the server's own tables.

use std::str::FromStr;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};
use folio_engine::TimeLimit;
use folio_server::{Limits, Timeouts};

/// A parser of numbers from 1 to `most`, which no sensible set-up exceeds.
fn upto<T: TryFrom<u64> + Clone + Send + Sync + 'static>(most: u64) -> RangedU64ValueParser<T>
where
    <T as TryFrom<u64>>::Error: Send + Sync + std::error::Error + 'static,
{
    RangedU64ValueParser::new().range(1..=most)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SpeltTokens {
    /// Plain text
    Text,
    /// The control token itself
    Control,
}

/// Limits of what clients may ask for. A request beyond one of them is refused.
#[derive(Args, Clone)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Maximum bytes of a request body
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().body_bytes, value_parser = upto::<usize>(1 << 30), hide_short_help = true)]
    pub max_body_bytes: usize,
    /// Maximum JSON nesting depth of a request body
    #[arg(long, value_name = "N", default_value_t = Limits::default().json_depth, value_parser = upto::<usize>(120), hide_short_help = true)]
    pub max_json_depth: usize,
    /// Maximum number of JSON values in a request body, nested ones included
    #[arg(long, value_name = "N", default_value_t = Limits::default().json_values, value_parser = upto::<usize>(1 << 28), hide_short_help = true)]
    pub max_json_values: usize,
    /// Maximum bytes of a request line and header
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().header_bytes, value_parser = RangedU64ValueParser::<usize>::new().range(8 << 10..=1 << 20), hide_short_help = true)]
    pub max_header_bytes: usize,
    /// Maximum number of fields in a header
    #[arg(long, value_name = "N", default_value_t = Limits::default().header_fields, value_parser = upto::<usize>(1024), hide_short_help = true)]
    pub max_header_fields: usize,
    /// Maximum number of prompts in a request
    #[arg(long, value_name = "N", default_value_t = Limits::default().prompts, value_parser = upto::<usize>(1 << 16), hide_short_help = true)]
    pub max_prompts: usize,
    /// Maximum number of inputs in an embeddings request
    #[arg(long, value_name = "N", default_value_t = Limits::default().embedding_inputs, value_parser = upto::<usize>(1 << 16), hide_short_help = true)]
    pub max_embedding_inputs: usize,
    /// Maximum number of answers to a prompt, `n`
    #[arg(long, value_name = "N", default_value_t = Limits::default().samples, value_parser = upto::<usize>(16), hide_short_help = true)]
    pub max_n: usize,
    /// Maximum number of stop strings in a request
    #[arg(long, value_name = "N", default_value_t = Limits::default().stops, value_parser = upto::<usize>(1024), hide_short_help = true)]
    pub max_stop: usize,
    /// Maximum characters of a stop string
    #[arg(long, value_name = "CHARACTERS", default_value_t = Limits::default().stop_chars, value_parser = upto::<usize>(1 << 16), hide_short_help = true)]
    pub max_stop_chars: usize,
    /// Maximum number of stop token ids in a request
    #[arg(long, value_name = "N", default_value_t = Limits::default().stop_token_ids, value_parser = upto::<usize>(1 << 16), hide_short_help = true)]
    pub max_stop_token_ids: usize,
    /// Maximum number of bad words in a request
    #[arg(long, value_name = "N", default_value_t = Limits::default().bad_words, value_parser = upto::<usize>(128), hide_short_help = true)]
    pub max_bad_words: usize,
    /// Maximum tokens of all bad words of a request together
    #[arg(long, value_name = "N", default_value_t = Limits::default().bad_word_tokens, value_parser = upto::<usize>(1024), hide_short_help = true)]
    pub max_bad_word_tokens: usize,
    /// Maximum number of entries in `logit_bias`
    #[arg(long, value_name = "N", default_value_t = Limits::default().logit_biases, value_parser = upto::<usize>(1 << 20), hide_short_help = true)]
    pub max_logit_bias: usize,
    /// Maximum number of most likely tokens reported beside each token
    #[arg(long, value_name = "N", default_value_t = Limits::default().logprobs, value_parser = upto::<u32>(1024))]
    pub max_logprobs: u32,
    /// Maximum number of prompt log-probabilities in an answer
    #[arg(long, value_name = "N", default_value_t = Limits::default().prompt_logprob_values, value_parser = upto::<usize>(1 << 28), hide_short_help = true)]
    pub max_prompt_logprob_values: usize,
    /// Maximum number of messages in a chat
    #[arg(long, value_name = "N", default_value_t = Limits::default().messages, value_parser = upto::<usize>(1 << 20), hide_short_help = true)]
    pub max_messages: usize,
    /// Treatment of messages that spell one of the model's control tokens
    #[arg(long, value_name = "KIND", value_enum, default_value_t = SpeltTokens::Text, help_heading = "Model")]
    pub control_tokens_in_messages: SpeltTokens,
    /// Maximum number of entries in `chat_template_kwargs`
    #[arg(long, value_name = "N", default_value_t = Limits::default().template_kwargs, value_parser = upto::<usize>(1024), hide_short_help = true)]
    pub max_template_kwargs: usize,
    /// Maximum bytes of all values in `chat_template_kwargs` together
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().template_kwarg_bytes, value_parser = upto::<usize>(1 << 20), hide_short_help = true)]
    pub max_template_kwarg_bytes: usize,
    /// Maximum number of open connections
    #[arg(long, value_name = "N", default_value_t = Limits::default().connections, value_parser = upto::<usize>(1 << 20))]
    pub max_connections: usize,
    /// Maximum number of requests in flight
    #[arg(long, value_name = "N", default_value_t = Limits::default().in_flight, value_parser = upto::<usize>(1 << 20))]
    pub max_in_flight: usize,
    /// Maximum number of requests in flight per API key; the key file can set another for a key
    #[arg(long, value_name = "N", default_value_t = Limits::default().in_flight_per_key, value_parser = upto::<usize>(1 << 20))]
    pub max_in_flight_per_key: usize,
    /// Maximum bytes of an answer buffered for a slow client
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().stream_bytes, value_parser = RangedU64ValueParser::<usize>::new().range(4 << 10..=1 << 30), hide_short_help = true)]
    pub max_stream_bytes: usize,
    /// Maximum bytes of a client's request id
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().request_id_bytes, value_parser = upto::<usize>(4096), hide_short_help = true)]
    pub max_request_id_bytes: usize,
    /// Maximum bytes of `cache_salt`
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().cache_salt_bytes, value_parser = upto::<usize>(4096), hide_short_help = true)]
    pub max_cache_salt_bytes: usize,
    /// Maximum characters of `user`
    #[arg(long, value_name = "CHARACTERS", default_value_t = Limits::default().user_chars, value_parser = upto::<usize>(1 << 16), hide_short_help = true)]
    pub max_user_chars: usize,
    /// Maximum number of responses stored for `previous_response_id`
    #[arg(long, value_name = "N", default_value_t = Limits::default().stored_responses, value_parser = upto::<usize>(1 << 24), hide_short_help = true)]
    pub max_stored_responses: usize,
    /// Maximum bytes of all stored responses together
    #[arg(long, value_name = "BYTES", default_value_t = Limits::default().stored_response_bytes, value_parser = upto::<usize>(1 << 40), hide_short_help = true)]
    pub max_stored_response_bytes: usize,
}

impl LimitArgs {
    pub fn limits(&self) -> Limits {
        Limits {
            body_bytes: self.max_body_bytes,
            // The memory plan sets it.
            body_memory: Limits::default().body_memory,
            json_depth: self.max_json_depth,
            json_values: self.max_json_values,
            header_bytes: self.max_header_bytes,
            header_fields: self.max_header_fields,
            prompts: self.max_prompts,
            embedding_inputs: self.max_embedding_inputs,
            samples: self.max_n,
            stops: self.max_stop,
            stop_chars: self.max_stop_chars,
            stop_token_ids: self.max_stop_token_ids,
            bad_words: self.max_bad_words,
            bad_word_tokens: self.max_bad_word_tokens,
            logit_biases: self.max_logit_bias,
            logprobs: self.max_logprobs,
            prompt_logprob_values: self.max_prompt_logprob_values,
            messages: self.max_messages,
            control_tokens_in_messages: self.control_tokens_in_messages == SpeltTokens::Control,
            template_kwargs: self.max_template_kwargs,
            template_kwarg_bytes: self.max_template_kwarg_bytes,
            connections: self.max_connections,
            in_flight: self.max_in_flight,
            in_flight_per_key: self.max_in_flight_per_key,
            stream_bytes: self.max_stream_bytes,
            request_id_bytes: self.max_request_id_bytes,
            cache_salt_bytes: self.max_cache_salt_bytes,
            user_chars: self.max_user_chars,
            stored_responses: self.max_stored_responses,
            stored_response_bytes: self.max_stored_response_bytes,
        }
    }
}

/// Timeouts in seconds.
#[derive(Args, Clone)]
#[command(next_help_heading = "Timeouts")]
pub struct TimeoutArgs {
    /// Seconds for a request's header to arrive, from its first byte
    #[arg(long, value_name = "SECONDS", default_value_t = Timeouts::default().header.into(), hide_short_help = true)]
    pub header_timeout: Seconds,
    /// Seconds for a request's body to arrive, from the end of its header
    #[arg(long, value_name = "SECONDS", default_value_t = Timeouts::default().body.into(), hide_short_help = true)]
    pub body_timeout: Seconds,
    /// Seconds that a request may wait in the queue [default: any while the engine makes progress,
    /// 60 without progress]
    #[arg(long, value_name = "SECONDS")]
    pub queue_timeout: Option<Seconds>,
    /// Seconds that a client may leave its answer unread
    #[arg(long, value_name = "SECONDS", default_value_t = Timeouts::default().write_stall.into(), hide_short_help = true)]
    pub write_stall_timeout: Seconds,
    /// Seconds that a request may take in all [default: any while the engine makes progress, 600
    /// without progress]
    #[arg(long, value_name = "SECONDS")]
    pub request_timeout: Option<Seconds>,
    /// Seconds that a connection may stay open without a request
    #[arg(long, value_name = "SECONDS", default_value_t = Timeouts::default().idle.into(), hide_short_help = true)]
    pub idle_timeout: Seconds,
    /// Seconds that running requests may take to finish after a signal to end; 0 ends them at once
    #[arg(long, value_name = "SECONDS", alias = "shutdown-timeout", default_value = "30", value_parser = seconds_or_none)]
    pub drain_timeout: Seconds,
    /// Seconds without progress after which the engine counts as stuck
    #[arg(long, value_name = "SECONDS", default_value_t = Timeouts::default().stuck.into())]
    pub stuck_timeout: Seconds,
}

impl TimeoutArgs {
    pub fn timeouts(&self) -> Timeouts {
        let default = Timeouts::default();
        Timeouts {
            header: self.header_timeout.0,
            body: self.body_timeout.0,
            queue: self.queue_timeout.map_or(default.queue, |limit| TimeLimit::InAll(limit.0)),
            write_stall: self.write_stall_timeout.0,
            request: self.request_timeout.map_or(default.request, |limit| TimeLimit::InAll(limit.0)),
            idle: self.idle_timeout.0,
            drain: self.drain_timeout.0,
            stuck: self.stuck_timeout.0,
        }
    }
}

/// From 1 ms to a week.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl From<Duration> for Seconds {
    fn from(duration: Duration) -> Self {
        Self(duration)
    }
}

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.as_secs_f64())
    }
}

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let seconds = text.parse::<f64>().ok().filter(|seconds| (0.001..=604_800.0).contains(seconds));
        let seconds = seconds.ok_or("expected seconds, from 0.001 to 604800")?;
        Ok(Self(Duration::from_secs_f64(seconds)))
    }
}

fn seconds_or_none(text: &str) -> Result<Seconds, String> {
    if text.parse() == Ok(0.0) { Ok(Seconds(Duration::ZERO)) } else { text.parse() }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct All {
        #[command(flatten)]
        limits: LimitArgs,
        #[command(flatten)]
        timeouts: TimeoutArgs,
    }

    fn parse(flags: &[&str]) -> Result<All, String> {
        All::try_parse_from([&["folio"], flags].concat()).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_the_server_s() {
        let all = parse(&[]).expect("no flag is needed");
        assert_eq!(all.limits.limits(), Limits::default());
        assert_eq!(all.timeouts.timeouts(), Timeouts::default());
    }

    #[test]
    fn every_field_has_a_flag_of_its_own() {
        use clap::CommandFactory;
        let command = All::command();
        let flags: Vec<_> = command.get_arguments().filter(|arg| arg.get_id() != "help").collect();
        let fields = |debug: String| debug.lines().filter(|line| line.contains(": ")).count();
        let all = fields(format!("{:#?}", Limits::default())) + fields(format!("{:#?}", Timeouts::default()));
        // The memory plan sets one field, which has no flag.
        assert_eq!(flags.len() + 1, all);
        // A value other than the default changes exactly one field: no two flags set the same one.
        for flag in flags {
            let default = flag.get_default_values().first().and_then(|text| text.to_str()?.parse::<u64>().ok());
            let flag = flag.get_long().expect("a long name");
            let value = match (flag, default) {
                // The defaults of these are not numbers.
                ("queue-timeout", None) => "60".to_string(),
                ("request-timeout", None) => "600".to_string(),
                ("control-tokens-in-messages", None) => "control".to_string(),
                (_, default) => (default.expect("a whole number") - 1).to_string(),
            };
            let all = parse(&[&format!("--{flag}"), &value]);
            let all = all.unwrap_or_else(|error| panic!("--{flag}: {error}"));
            let lines = |text: String| text.lines().map(str::to_owned).collect::<Vec<_>>();
            let differ = |one: String, other: String| {
                lines(one).iter().zip(&lines(other)).filter(|(one, other)| one != other).count()
            };
            let limits = differ(format!("{:#?}", all.limits.limits()), format!("{:#?}", Limits::default()));
            let timeouts = differ(format!("{:#?}", all.timeouts.timeouts()), format!("{:#?}", Timeouts::default()));
            assert_eq!(limits + timeouts, 1, "--{flag}");
        }
    }

    #[test]
    fn zero_and_absurd_values_are_refused_by_name() {
        let refused = [
            ("--max-n", "0"),
            ("--max-body-bytes", "0"),
            ("--max-body-bytes", "99999999999999"),
            ("--max-json-depth", "100000"),
            ("--max-header-bytes", "100"),
            ("--max-logprobs", "-1"),
            ("--queue-timeout", "0"),
            ("--request-timeout", "inf"),
            ("--idle-timeout", "nan"),
            ("--drain-timeout", "-1"),
        ];
        for (flag, value) in refused {
            let error =
                parse(&[&format!("{flag}={value}")]).err().unwrap_or_else(|| panic!("{flag} {value} was taken"));
            assert!(error.contains(flag) && error.contains(value), "{error}");
        }
        assert_eq!(parse(&["--drain-timeout", "0"]).expect("zero").timeouts.timeouts().drain, Duration::ZERO);
    }
}
