//! How the server ends: told to, it takes no more, finishes what is under way within the drain time, and says goodbye
//! to whoever is left; told twice, it ends at once. Until then it watches whether the engine gets anywhere.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use folio_engine::Engine;
use folio_server::Timeouts;
use folio_server::guard::{Guard, Lifecycle};
use folio_server::net::ShutdownHandle;
use folio_server::observe::{Log, Observer};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::signals::{Signal, Signals};

/// Between looks at whether the last request has ended.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// For the engine's thread to end: a step may be under way, and a wedged one never ends.
const ENGINE_END: Duration = Duration::from_secs(5);
/// For connections to write their last bytes, after the engine has ended.
const CLOSE: Duration = Duration::from_secs(3);
const LAST_LINE: Duration = Duration::from_millis(200);

/// All that is to be ended.
pub struct Ending {
    pub log: Log,
    pub lifecycle: Lifecycle,
    pub guard: Arc<Guard>,
    pub observer: Observer,
    pub shutdown: ShutdownHandle,
    pub timeouts: Timeouts,
    /// A task for each listener.
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
                log.warn("told again to end", &[("signal", second.name().into())]);
                log.flush(LAST_LINE);
                second.exit_code()
            }
        }
    }

    /// The end of a server that has not begun to answer.
    pub async fn while_loading(mut self, signal: Signal) -> ExitCode {
        self.lifecycle.set_draining();
        self.log.info("told to end while loading", &[("signal", signal.name().into())]);
        self.close().await;
        ExitCode::SUCCESS
    }

    async fn drain(&mut self, signal: Signal, engine: &Engine) {
        let begin = Instant::now();
        self.lifecycle.set_draining();
        let under_way = self.guard.in_flight();
        let fields = [("signal", signal.name().into()), ("requests_under_way", under_way.into())];
        self.log.info("told to end; no more requests are taken", &fields);
        while self.guard.in_flight() > 0 && begin.elapsed() < self.timeouts.drain {
            sleep(LOOK_EVERY).await;
        }
        let left = self.guard.in_flight();
        if left > 0 {
            self.log.warn("out of time; what is under way is ended", &[("requests", left.into())]);
        }
        // Streams under way end with an error event.
        let engine = engine.clone();
        let ended = tokio::task::spawn_blocking(move || engine.shutdown());
        if timeout(ENGINE_END, ended).await.is_err() {
            self.log.error("the engine does not end and is left behind", &[]);
        }
        self.close().await;
        self.log.info("ended", &[("requests_ended_early", left.into()), ("total_ms", begin.elapsed().into())]);
        self.log.flush(LAST_LINE);
    }

    /// Connections write what is left to write; then traces and log.
    async fn close(&mut self) {
        self.shutdown.close_within(CLOSE);
        for serving in self.serving.drain(..) {
            // A listener's task that panicked has ended too.
            let _ = serving.await;
        }
        self.observer.shutdown().await;
    }
}

/// Says once when the engine stops getting anywhere, and once when it goes on. One that builds its executor anew is
/// busy, and says so itself.
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
                log.error("the engine is stuck: it has work and gets nowhere", &fields);
            }
            (None, Some(begin)) => {
                since = None;
                log.error("the engine goes on", &[("stalled_ms", begin.elapsed().into())]);
            }
            _ => {}
        }
    }
}
