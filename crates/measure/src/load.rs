//! The load generator: requests to any OpenAI endpoint, and the report of `vllm bench serve` about
//! them.
//!
//! One thread sends and reads, so that a server on the same machine keeps the others. A request
//! that fails, for whatever reason, is counted and does not end the run.

mod answer;
mod arrivals;
mod ask;
mod client;
mod framing;
mod metrics;
mod options;
mod report;
mod rng;
mod run;
mod sse;
#[cfg(test)]
mod tests;
mod url;
mod workload;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::progress::Progress;
pub use answer::Outcome;
use answer::message;
use arrivals::Pace;
use ask::Asker;
use client::Client;
pub use metrics::{Metrics, Spread};
pub use options::*;
pub use report::Report;
use rng::Rng;
use url::BaseUrl;
use workload::Workload;

/// The random stream of a seed for arrivals, separate from those of prompts.
const ARRIVALS: u64 = 1;

/// Sends the requests, reads the answers, and reports on them.
pub fn run(options: &Options, progress: Arc<dyn Progress>) -> Result<Report> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(load(options, progress))
}

async fn load(options: &Options, progress: Arc<dyn Progress>) -> Result<Report> {
    let Options { target, prompts, traffic, contents } = options;
    if traffic.max_concurrency == Some(0) {
        bail!("--max-concurrency is 0, but must be at least 1");
    }
    let client = Client::new(&BaseUrl::parse(&target.base_url)?, target.api_key.as_deref()).await?;
    let model = match &target.model {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let Workload { asks, timestamps, alphabet } =
        workload::prepare(prompts, &client, &model, target.backend.is_chat(), &*progress).await?;
    let arrivals = match (timestamps, traffic.request_rate) {
        (Some(timestamps), None) => arrivals::recorded(&timestamps),
        (_, rate) => {
            let pace = Pace { rate: rate.unwrap_or(f64::INFINITY), burstiness: traffic.burstiness };
            arrivals::drawn(pace, asks.len(), &mut Rng::stream(prompts.seed, ARRIVALS))
        }
    };
    let asker = Arc::new(Asker {
        client,
        path: endpoint(target)?,
        model,
        is_chat: target.backend.is_chat(),
        temperature: target.temperature,
        ignore_eos: target.ignore_eos || matches!(prompts.dataset, Dataset::Random(_) | Dataset::Trace(_)),
        alphabet,
        timeout: target.request_timeout,
        keeps_text: contents.detailed,
    });
    let requests: Vec<run::Timed> = arrivals.into_iter().zip(asks.into_iter().map(Arc::new)).collect();
    if traffic.num_warmups > 0 {
        let warmup = (Duration::ZERO, requests[0].1.clone());
        progress.begin("warming up", traffic.num_warmups);
        run::run(&asker, vec![warmup; traffic.num_warmups], traffic.max_concurrency, &progress).await;
    }
    progress.begin("requests", requests.len());
    let (outcomes, duration) = run::run(&asker, requests, traffic.max_concurrency, &progress).await;
    progress.end();
    let metrics = Metrics::new(&outcomes, duration, &contents.percentiles, &contents.goals);
    let date = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(Report { options: options.clone(), model: asker.model.clone(), date, metrics, outcomes })
}

fn endpoint(target: &Target) -> Result<String> {
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
