//! The run itself: every request at its time, as many at once as permitted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::answer::Outcome;
use super::ask::Asker;
use super::workload::Ask;
use crate::progress::Progress;

/// A request, and its send time from the start of the run.
pub type Timed = (Duration, Arc<Ask>);

/// Sends all requests and waits for all: returns their outcomes, in the same order, and the seconds
/// it took. `requests` are in order of time. Waiting for the limit of requests in flight does not
/// count in a request's own times.
pub async fn run(
    asker: &Arc<Asker>,
    requests: Vec<Timed>,
    max_concurrency: Option<usize>,
    progress: &Arc<dyn Progress>,
) -> (Vec<Outcome>, f64) {
    let places = Arc::new(Semaphore::new(max_concurrency.unwrap_or(Semaphore::MAX_PERMITS)));
    let mut outcomes = vec![Outcome::default(); requests.len()];
    let mut tasks = JoinSet::new();
    let began = Instant::now();
    for (number, (time, ask)) in requests.into_iter().enumerate() {
        if !time.is_zero() {
            tokio::time::sleep_until((began + time).into()).await;
        }
        let (asker, places, progress) = (asker.clone(), places.clone(), progress.clone());
        tasks.spawn(async move {
            let _place = places.acquire().await.expect("the semaphore is never closed");
            let outcome = asker.ask(&ask, began).await;
            progress.advance(1);
            (number, outcome)
        });
    }
    while let Some(done) = tasks.join_next().await {
        let (number, outcome) = done.expect("asking does not panic");
        outcomes[number] = outcome;
    }
    (outcomes, began.elapsed().as_secs_f64())
}
