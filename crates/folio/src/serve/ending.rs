//! The end of the server. A signal makes it drain: new requests are refused, running ones may
//! finish within the drain timeout, the rest are aborted with an error event. A second signal ends
//! it at once. Until then a task watches whether the engine makes progress.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use folio_engine::Engine;
use folio_server::Timeouts;
use folio_server::guard::{Guard, Lifecycle};
use folio_server::net::ShutdownHandle;
use folio_server::observe::{Log, Observer};
use folio_terminal::{Signal, Signals};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Interval of checks whether the last request has ended.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Time for the engine's thread to end. A step may be running, and a wedged one never ends.
const ENGINE_END: Duration = Duration::from_secs(5);
/// Time for connections to write their last bytes after the engine has ended.
const CLOSE: Duration = Duration::from_secs(3);
const LAST_LINE: Duration = Duration::from_millis(200);

/// The parts of the server that are ended.
pub struct Ending {
    pub log: Log,
    pub lifecycle: Lifecycle,
    pub guard: Arc<Guard>,
    pub observer: Observer,
    pub shutdown: ShutdownHandle,
    pub timeouts: Timeouts,
    /// One task for each listener.
    pub serving: Vec<JoinHandle<io::Result<()>>>,
}

impl Ending {
    /// Waits for a signal and ends the server.
    pub async fn run(mut self, engine: &Engine, mut signals: Signals) -> ExitCode {
        let watchdog = tokio::spawn(watch(engine.clone(), self.log.clone(), self.timeouts.stuck));
        let signal = signals.next().await;
        watchdog.abort();
        let log = self.log.clone();
        tokio::select! {
            () = self.drain(signal, engine) => ExitCode::SUCCESS,
            second = signals.next() => {
                log.warn("second signal: ending at once", &[("signal", second.name().into())]);
                log.flush(LAST_LINE);
                second.exit_code()
            }
        }
    }

    /// Ends a server that is still loading.
    pub async fn while_loading(mut self, signal: Signal) -> ExitCode {
        self.lifecycle.set_draining();
        self.log.info("signal received while loading: ending", &[("signal", signal.name().into())]);
        self.close().await;
        ExitCode::SUCCESS
    }

    async fn drain(&mut self, signal: Signal, engine: &Engine) {
        let begin = Instant::now();
        self.lifecycle.set_draining();
        let in_flight = self.guard.in_flight();
        let fields = [("signal", signal.name().into()), ("requests_in_flight", in_flight.into())];
        self.log.info("signal received: draining, new requests are refused", &fields);
        while self.guard.in_flight() > 0 && begin.elapsed() < self.timeouts.drain {
            sleep(LOOK_EVERY).await;
        }
        let left = self.guard.in_flight();
        if left > 0 {
            self.log.warn("drain timeout: aborting the remaining requests", &[("requests", left.into())]);
        }
        // Streams in flight end with an error event.
        let engine = engine.clone();
        let ended = tokio::task::spawn_blocking(move || engine.shutdown());
        if timeout(ENGINE_END, ended).await.is_err() {
            self.log.error("the engine did not end in time", &[]);
        }
        self.close().await;
        self.log.info("ended", &[("requests_ended_early", left.into()), ("total_ms", begin.elapsed().into())]);
        self.log.flush(LAST_LINE);
    }

    /// Lets connections write their last bytes, then traces and the log.
    async fn close(&mut self) {
        self.shutdown.close_within(CLOSE);
        for serving in self.serving.drain(..) {
            // A task that panicked has ended too.
            let _ = serving.await;
        }
        self.observer.shutdown().await;
    }
}

/// Logs once when the engine stops making progress, and once when it continues. An engine that
/// restarts its executor reports that itself.
async fn watch(engine: Engine, log: Log, stuck: Duration) {
    let mut since: Option<Instant> = None;
    loop {
        sleep((stuck / 4).clamp(LOOK_EVERY, Duration::from_secs(1))).await;
        if engine.is_restarting() {
            continue;
        }
        let stalled = engine.stalled_for().filter(|stalled| *stalled > stuck);
        match (stalled, since) {
            (Some(stalled), None) => {
                since = Instant::now().checked_sub(stalled);
                let fields = [("stalled_ms", stalled.into()), ("requests", engine.num_live().into())];
                log.error("the engine is stuck: it has requests but makes no progress", &fields);
            }
            (None, Some(begin)) => {
                since = None;
                log.error("the engine makes progress again", &[("stalled_ms", begin.elapsed().into())]);
            }
            _ => {}
        }
    }
}
