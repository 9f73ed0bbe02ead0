//! The lines on standard error while a server starts: model, memory plan, access, addresses, and a
//! command to try it with.

use std::time::Instant;

use folio_server::observe::{Log, LogFormat};
use folio_session::{Assets, Drafting, Opened, Phases, Session};
use serde_json::{Value, json};

use super::access::Access;
use super::listen::Bound;
use crate::args::ServeArgs;

pub struct Greeting<'a> {
    pub args: &'a ServeArgs,
    pub access: &'a Access,
    pub bound: &'a Bound,
    pub log: &'a Log,
    pub name: &'a str,
    pub started: Instant,
}

impl Greeting<'_> {
    /// Prints the greeting before the model is loaded.
    pub fn begin(&self, opened: &Opened, device: &str) {
        let Opened { assets, drafting, plan, .. } = opened;
        let notes = self.args.vllm.notes.iter().chain(&assets.note);
        let warnings = self.access.warnings.iter().cloned().chain(self.access.event_warning(self.args));
        if self.is_json() {
            notes.for_each(|note| self.log.info(note, &[]));
            warnings.for_each(|warning| self.log.warn(&warning, &[]));
            let url = self.bound.url();
            let speculation = drafting.as_ref().map_or("off".to_owned(), Drafting::describe);
            let fields = [
                ("model", self.name.into()),
                ("url", (&url).into()),
                ("max_model_len", plan.max_model_len.into()),
                ("max_num_seqs", plan.max_seqs.into()),
                ("device", device.into()),
                ("threads", plan.threads.into()),
                ("planned_bytes", plan.bytes.total().into()),
                ("kv_tokens", plan.kv_tokens().into()),
                ("speculation", speculation.as_str().into()),
                ("keys", self.access.keys.len().into()),
                ("tls", self.bound.tls.is_some().into()),
            ];
            return self.log.info("loading", &fields);
        }
        notes.for_each(|note| say!("note: {note}"));
        warnings.for_each(|warning| say!("warning: {warning}"));
        say!("folio {}: {}, {device}", env!("CARGO_PKG_VERSION"), describe(assets, self.name));
        if let Some(drafting) = drafting {
            say!("speculative decoding: {}", drafting.describe());
        }
        say!("{}", plan.to_text(self.name).trim_end());
        for (what, state) in
            [("keys", self.keys()), ("TLS", self.tls()), ("metrics", self.metrics()), ("traces", self.traces())]
        {
            say!("  {what:<8} {state}");
        }
        say!("loading; {} answers 503 to all but /health, /ready, /version and /metrics until then", self.bound.url());
    }

    /// Prints the line that scripts wait for, once requests are answered.
    pub fn ready(&self, phases: &Phases) {
        for note in &phases.notes {
            match self.is_json() {
                true => self.log.warn(note, &[]),
                false => say!("warning: {note}"),
            }
        }
        let url = self.bound.url();
        if self.is_json() {
            let parts = phases.describe();
            let fields = [
                ("model", self.name.into()),
                ("url", (&url).into()),
                ("start_ms", self.started.elapsed().into()),
                ("start", (&parts).into()),
            ];
            return self.log.info("ready", &fields);
        }
        let seconds = self.started.elapsed().as_secs_f64();
        let key = if self.access.keys.is_empty() { "" } else { " -H \"authorization: Bearer $FOLIO_API_KEY\"" };
        say!(
            "loaded in {seconds:.2} s: {}\n{} is ready at {url}\n  try: curl {}/v1/chat/completions{key} -H 'content-type: \
             application/json' -d '{{\"messages\":[{{\"role\":\"user\",\"content\":\"What does `Rc::clone` do?\"}}]}}'",
            phases.describe(),
            self.name,
            self.bound.curl(),
        );
    }

    fn is_json(&self) -> bool {
        self.args.log.log_format == LogFormat::Json
    }

    fn keys(&self) -> String {
        match self.access.keys.len() {
            0 if self.args.access.insecure_no_auth => "none (--insecure-no-auth): any client may use the server".into(),
            0 if self.args.listen.uds.is_some() => "none: only this user can connect".into(),
            0 => "none: every user of this machine may use the server".into(),
            1 => format!("1, from {}", self.access.sources.join(" and ")),
            many => format!("{many}, from {}; each has its own prefix cache", self.access.sources.join(" and ")),
        }
    }

    fn tls(&self) -> String {
        match &self.args.listen.tls_cert {
            Some(path) => format!("on, {}", path.display()),
            None => "off".into(),
        }
    }

    fn metrics(&self) -> String {
        let own = self.bound.metrics_url().map(|url| format!("{url} (no key); "));
        let key = if self.access.keys.is_empty() { "" } else { " (with a key)" };
        format!("{}{}/metrics{key}", own.unwrap_or_default(), self.bound.url())
    }

    fn traces(&self) -> String {
        self.args.log.otlp_traces_endpoint.clone().unwrap_or_else(|| "off".into())
    }
}

fn describe(assets: &Assets, name: &str) -> String {
    let spec = &assets.model.spec;
    let own = if assets.name == name { String::new() } else { format!(" ({})", assets.name) };
    format!("{name}{own}, {} layers, vocabulary {}", spec.layers.len(), spec.vocab_size)
}

/// The fields of `/server_info`. Paths on this machine are not among them.
pub fn info(session: &Session) -> Value {
    let (plan, spec) = (&session.plan, &session.assets.model.spec);
    json!({
        "max_num_batched_tokens": plan.budget_tokens,
        "block_size": folio_device::BLOCK_TOKENS,
        "hidden_size": spec.hidden,
        "num_layers": spec.layers.len(),
        "threads": plan.threads,
        "tensor_parallel_size": 1,
        "tp_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "dtype": "bfloat16",
    })
}

/// A function that prints the engine's warnings to standard error, since the engine has no log.
pub fn warner(format: LogFormat) -> fn(std::fmt::Arguments<'_>) {
    match format {
        LogFormat::Text => |line| say!("warning: {line}"),
        LogFormat::Json => |line| say!("{}", json!({"level": "warn", "message": line.to_string()})),
    }
}
