//! `folio batch`: a file of requests in OpenAI's batch format, answered offline.
//!
//! Every line goes through the routes of a server, in this process and without a socket, so that it
//! is checked and answered in the same way. Answers are appended as they come, one whole line at a
//! time: stopping the program loses only the requests in flight, and the next run continues from
//! there. The next run also retries all lines without an answer, whether the request failed or the
//! line was invalid. The exit status is a failure as long as a line has no answer.

mod input;
mod output;

use std::collections::HashSet;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use folio_engine::TimeLimit;
use folio_server::guard::{Lifecycle, RequestIds};
use folio_server::observe::Observer;
use folio_server::{App, Limits, Timeouts};
use folio_session::Session;
use http::{HeaderMap, Request, header};
use http_body_util::{BodyExt, Full};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use tokio::task::JoinSet;
use tower::ServiceExt;

use crate::args::BatchArgs;
use crate::{hooks, serve};
use input::{Line, Lines};
use output::{Answer, Output};

/// Timeout of a request. In a batch there is no hurry.
const PATIENCE: Duration = Duration::from_secs(7 * 24 * 3600);
/// Length of the queue. Requests may have many answers each, and none is refused because the queue
/// is full.
const MAX_WAITING: usize = 1 << 20;

pub fn main(args: BatchArgs) -> Result<ExitCode> {
    let path = args.output.clone().unwrap_or_else(|| args.input.with_extension("out.jsonl"));
    // The user's own file needs no memory limit; a limit would only refuse lines.
    let limits = Limits { body_memory: usize::MAX, ..args.limits.limits() };
    let (lines, total) = Lines::open(&args.input, limits.body_bytes)?;
    let mut output = Output::open(&path)?;
    let mut options = args.model.engine.options()?;
    if args.concurrency.is_some_and(|concurrency| !(1..=1 << 16).contains(&concurrency)) {
        bail!("--concurrency must be from 1 to 65536");
    }
    options.queue.max_waiting = options.queue.max_waiting.or(Some(MAX_WAITING));
    let assets = serve::open(&args.model, &options, &args.naming)?;
    if let Some(note) = &assets.note {
        say!("note: {note}");
    }
    let names = serve::names(&args.naming, &assets);
    let session = Session::start(assets, &options, hooks::hooks())?;
    let concurrency = args.concurrency.unwrap_or(session.plan.max_seqs);
    // The file is rewritten only after everything else has been checked.
    output.keep_answers()?;

    let timeouts = Timeouts {
        request: TimeLimit::InAll(PATIENCE),
        queue: TimeLimit::InAll(PATIENCE),
        stuck: PATIENCE,
        ..Timeouts::default()
    };
    let observer = Observer::quiet(&names.listed[0], session.plan.max_model_len);
    let app = App::new(limits, timeouts, Lifecycle::new(), observer);
    app.set_model(serve::model(&session, names));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let mut run = Run { app, output, concurrency, bar: bar(total), tally: Tally::default() };
    let begin = Instant::now();
    runtime.block_on(run.all(lines))?;
    run.bar.finish_and_clear();
    run.tally.report(begin.elapsed(), &path);
    session.end();
    Ok(if run.tally.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Run {
    app: App,
    output: Output,
    concurrency: usize,
    bar: ProgressBar,
    tally: Tally,
}

/// Counts of lines by result.
#[derive(Default)]
struct Tally {
    answered: usize,
    failed: usize,
    skipped: usize,
    prompt_tokens: u64,
    completion_tokens: u64,
}

impl Run {
    async fn all(&mut self, lines: Lines) -> Result<()> {
        let router = folio_server::router(self.app.clone());
        let ids = RequestIds::new(0);
        let mut seen = HashSet::new();
        let mut in_flight = JoinSet::new();
        for line in lines {
            let Line { id, parsed } = line?;
            let ask = match parsed {
                Ok(ask) if !seen.insert(ask.custom_id.clone()) => {
                    self.refused(
                        &id,
                        Some(ask.custom_id),
                        "duplicate_custom_id",
                        "an earlier line has the same custom_id",
                    )?;
                    continue;
                }
                Ok(ask) if self.output.has(&ask.custom_id) => {
                    self.tally.skipped += 1;
                    self.bar.inc(1);
                    continue;
                }
                Ok(ask) => ask,
                Err((custom_id, why)) => {
                    self.refused(&id, custom_id, "invalid_line", &why)?;
                    continue;
                }
            };
            while in_flight.len() >= self.concurrency {
                self.take(in_flight.join_next().await)?;
            }
            let request_id = ids.next(&HeaderMap::new());
            let shown = request_id.id.to_string();
            let mut request = Request::post(ask.url)
                .header(header::CONTENT_TYPE, "application/json")
                .body(Full::from(ask.body.to_string()))
                .context("the request")?;
            request.extensions_mut().insert(request_id);
            let router = router.clone();
            in_flight.spawn(async move { answer(router.oneshot(request).await, id, ask.custom_id, shown).await });
        }
        while !in_flight.is_empty() {
            self.take(in_flight.join_next().await)?;
        }
        Ok(())
    }

    fn take(&mut self, ended: Option<Result<Answer, tokio::task::JoinError>>) -> Result<()> {
        let Some(ended) = ended else { return Ok(()) };
        let answer = ended.context("a request panicked; run the same command again to continue")?;
        match answer.is_good() {
            true => self.tally.answered += 1,
            false => self.tally.failed += 1,
        }
        let (prompt, completion) = answer.usage();
        self.tally.prompt_tokens += prompt;
        self.tally.completion_tokens += completion;
        self.write(&answer)
    }

    /// Writes the error for a line that is not a request.
    fn refused(&mut self, id: &str, custom_id: Option<String>, code: &str, why: &str) -> Result<()> {
        self.tally.failed += 1;
        self.write(&Answer::refused(id, custom_id, code, why))
    }

    fn write(&mut self, answer: &Answer) -> Result<()> {
        self.output.append(answer)?;
        self.bar.inc(1);
        if self.tally.failed > 0 {
            self.bar.set_message(format!("{} failed", self.tally.failed));
        }
        Ok(())
    }
}

/// The output line for a response.
async fn answer<B>(
    response: Result<http::Response<B>, std::convert::Infallible>,
    id: String,
    custom_id: String,
    request_id: String,
) -> Answer
where
    B: BodyExt,
    B::Error: std::fmt::Display,
{
    let Ok(response) = response;
    let status = response.status().as_u16();
    match response.into_body().collect().await {
        Ok(body) => {
            let bytes = body.to_bytes();
            let body = serde_json::from_slice(&bytes);
            let body = body.unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
            Answer::new(id, custom_id, status, request_id, body)
        }
        Err(error) => Answer::refused(&id, Some(custom_id), "server_error", &error.to_string()),
    }
}

impl Tally {
    fn report(&self, took: Duration, path: &std::path::Path) {
        let seconds = took.as_secs_f64().max(1e-9);
        let asked = self.answered + self.failed;
        say!(
            "{} answered, {} failed{}, {} skipped as answered before: {}\n{seconds:.1} s, {:.1} requests/s, {} prompt \
             tokens, {} completion tokens ({:.1}/s)",
            self.answered,
            self.failed,
            if self.failed > 0 { " (the same command retries them)" } else { "" },
            self.skipped,
            path.display(),
            asked as f64 / seconds,
            self.prompt_tokens,
            self.completion_tokens,
            self.completion_tokens as f64 / seconds,
        );
    }
}

fn bar(total: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {per_sec}  ETA {eta}  {msg}");
    ProgressBar::new(total as u64).with_style(style.expect("the template is well formed"))
}
