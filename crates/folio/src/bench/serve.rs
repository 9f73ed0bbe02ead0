//! `folio bench serve`: load on any OpenAI endpoint, and the report of `vllm bench serve` about it.
//!
//! One thread asks and listens, so that a server on the same machine keeps the others. A request that fails, for
//! whatever reason, is counted and does not end the run.

mod answer;
mod arrivals;
mod ask;
mod client;
mod framing;
mod metrics;
mod report;
mod rng;
mod run;
mod sse;
#[cfg(test)]
mod tests;
mod url;
mod workload;

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use serde_json::Value;

use crate::args::{Dataset, ServeBench, TargetArgs};
use answer::{Outcome, message};
use arrivals::Pace;
use ask::Asker;
use client::Client;
use metrics::Metrics;
use report::Report;
use rng::Rng;
use url::BaseUrl;
use workload::Workload;

/// Different errors that are worth listing.
const MAX_ERRORS: usize = 10;

/// Tells the draws of arrivals from those of prompts.
const ARRIVALS: u64 = 1;

pub fn main(args: &ServeBench) -> Result<()> {
    let key = ["FOLIO_API_KEY", "OPENAI_API_KEY"].into_iter().find_map(|name| std::env::var(name).ok());
    let key = key.filter(|key| !key.is_empty());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (model, outcomes, duration) = runtime.block_on(bench(args, key.as_deref()))?;
    let metrics = Metrics::new(&outcomes, duration, &args.result.metric_percentiles, &args.result.goodput);
    let date = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let report = Report { args, model: &model, date, metrics: &metrics, outcomes: &outcomes };
    let printed = out!("{}", report.text());
    tell_errors(&outcomes);
    // A file that was asked for is written even if nobody reads the table.
    if args.result.save_result {
        report.save()?;
    }
    if metrics.completed == 0 {
        bail!("every request failed");
    }
    printed
}

/// The model that answered, what came of each request, and how many seconds all took.
async fn bench(args: &ServeBench, api_key: Option<&str>) -> Result<(String, Vec<Outcome>, f64)> {
    let target = &args.target;
    if args.traffic.max_concurrency == Some(0) {
        bail!("--max-concurrency is 0, but must be at least 1");
    }
    let client = Client::new(&base_url(target)?, api_key).await?;
    let model = match &target.model {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let bar = progress(args, "preparing");
    let Workload { asks, timestamps, alphabet } =
        workload::prepare(&args.dataset, &client, &model, target.backend.is_chat(), &bar).await?;
    bar.finish_and_clear();
    let arrivals = match (timestamps, args.traffic.request_rate) {
        (Some(timestamps), None) => arrivals::recorded(&timestamps),
        (_, rate) => {
            let pace = Pace { rate: rate.unwrap_or(f64::INFINITY), burstiness: args.traffic.burstiness };
            arrivals::drawn(pace, asks.len(), &mut Rng::stream(args.dataset.seed, ARRIVALS))
        }
    };
    let asker = Arc::new(Asker {
        client,
        path: endpoint(target)?,
        model,
        is_chat: target.backend.is_chat(),
        temperature: target.temperature,
        ignore_eos: target.ignore_eos || matches!(args.dataset.dataset_name, Dataset::Random | Dataset::Trace),
        alphabet,
        timeout: Duration::try_from_secs_f64(target.request_timeout).unwrap_or(Duration::MAX),
        keeps_text: args.result.save_result && args.result.save_detailed,
    });
    let requests: Vec<run::Timed> = arrivals.into_iter().zip(asks.into_iter().map(Arc::new)).collect();
    if args.traffic.num_warmups > 0 {
        let warmup = (Duration::ZERO, requests[0].1.clone());
        let bar = progress(args, "warming up");
        bar.set_length(args.traffic.num_warmups as u64);
        run::run(&asker, vec![warmup; args.traffic.num_warmups], args.traffic.max_concurrency, &bar).await;
        bar.finish_and_clear();
    }
    let bar = progress(args, "requests");
    bar.set_length(requests.len() as u64);
    let (outcomes, duration) = run::run(&asker, requests, args.traffic.max_concurrency, &bar).await;
    bar.finish_and_clear();
    Ok((asker.model.clone(), outcomes, duration))
}

fn base_url(target: &TargetArgs) -> Result<BaseUrl> {
    match &target.base_url {
        Some(url) => BaseUrl::parse(url),
        None if target.host.contains(':') => BaseUrl::parse(&format!("http://[{}]:{}", target.host, target.port)),
        None => BaseUrl::parse(&format!("http://{}:{}", target.host, target.port)),
    }
}

fn endpoint(target: &TargetArgs) -> Result<String> {
    let route = if target.backend.is_chat() { "/v1/chat/completions" } else { "/v1/completions" };
    let endpoint = target.endpoint.as_deref().unwrap_or(route);
    if !endpoint.starts_with('/') {
        bail!("--endpoint: expected a path such as {route}, found `{endpoint}`");
    }
    Ok(url::path(endpoint)?.into())
}

async fn first_model(client: &Arc<Client>) -> Result<String> {
    let asked = client.json("GET", "/v1/models", None).await;
    let (status, answer) = asked.context("the server could not be asked for its models")?;
    match answer.pointer("/data/0/id").and_then(Value::as_str) {
        Some(id) if status == 200 => Ok(id.into()),
        _ => bail!("/v1/models names no model; give --model (the server answered {status}: {})", message(&answer)),
    }
}

/// On standard error, and only where that is a terminal.
fn progress(args: &ServeBench, what: &'static str) -> ProgressBar {
    if args.result.disable_tqdm {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len}  {rate}  {elapsed} < {eta}");
    let style =
        style.expect("the template is well formed").with_key("rate", |state: &ProgressState, out: &mut dyn Write| {
            // A line that cannot be drawn is not worth an error.
            let _ = write!(out, "{:.1}/s", state.per_sec());
        });
    ProgressBar::no_length().with_style(style).with_message(what)
}

fn tell_errors(outcomes: &[Outcome]) {
    let mut told: Vec<(&str, usize)> = Vec::new();
    for error in outcomes.iter().filter_map(|outcome| outcome.error.as_deref()) {
        match told.iter().position(|(known, _)| *known == error) {
            Some(known) => told[known].1 += 1,
            None if told.len() < MAX_ERRORS => told.push((error, 1)),
            None => {}
        }
    }
    for (error, count) in told {
        say!("{count} failed: {error}");
    }
}
