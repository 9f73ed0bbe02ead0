//! `/health`, `/ready` and their kin: whether requests are worth sending here.
//!
//! Health is tied to progress. An engine that has work and has got nowhere for too long is as good
//! as gone, however well its server answers; so is one that is being built anew.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use folio_engine::Engine;
use serde_json::{Value, json};

use crate::guard::Phase;
use crate::service::App;

/// Values of `status`; the first means healthy.
pub const STATUSES: [&str; 6] = ["ok", "loading", "draining", "stopped", "restarting", "stuck"];

/// Whether the server answers and its engine makes progress.
pub async fn health(State(app): State<App>) -> (StatusCode, Json<Value>) {
    answer(status(app.lifecycle().phase(), Signs::of(&app), app.timeouts().stuck))
}

/// Whether new requests are taken.
pub async fn ready(State(app): State<App>) -> (StatusCode, Json<Value>) {
    answer(readiness(app.lifecycle().phase(), Signs::of(&app)))
}

/// The number of requests in flight, in vLLM's form.
pub async fn load(State(app): State<App>) -> Json<Value> {
    Json(json!({"server_load": app.num_in_flight()}))
}

/// State of an engine that can be read without waiting.
#[derive(Clone, Copy)]
struct Signs {
    is_running: bool,
    is_restarting: bool,
    stalled: Option<Duration>,
}

impl Signs {
    /// The engine's signs of life; none while there is no engine yet.
    fn of(app: &App) -> Option<Self> {
        app.service().map(|service| {
            let engine: &Engine = &service.model.engine;
            let (is_running, is_restarting) = (engine.is_running(), engine.is_restarting());
            Self { is_running, is_restarting, stalled: engine.stalled_for() }
        })
    }
}

fn answer(status: &'static str) -> (StatusCode, Json<Value>) {
    let code = if status == STATUSES[0] { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(json!({"status": status})))
}

fn of_phase(phase: Phase) -> Option<&'static str> {
    match phase {
        Phase::Loading => Some("loading"),
        Phase::Draining => Some("draining"),
        Phase::Ready => None,
    }
}

fn status(phase: Phase, engine: Option<Signs>, stuck_after: Duration) -> &'static str {
    if let Some(word) = of_phase(phase) {
        return word;
    }
    match engine {
        None => "loading",
        Some(Signs { is_running: false, .. }) => "stopped",
        Some(Signs { is_restarting: true, .. }) => "restarting",
        Some(Signs { stalled: Some(stalled), .. }) if stalled > stuck_after => "stuck",
        Some(_) => "ok",
    }
}

/// An engine that is slow, or being built anew, takes requests all the same; one that has ended
/// takes none ever again.
fn readiness(phase: Phase, engine: Option<Signs>) -> &'static str {
    let is_stopped = engine.is_some_and(|signs| !signs.is_running);
    of_phase(phase).unwrap_or(if is_stopped { "stopped" } else { "ok" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_ready_until_its_engine_has_ended() {
        let well = Signs { is_running: true, is_restarting: false, stalled: None };
        for (phase, engine, expected) in [
            (Phase::Ready, Some(well), "ok"),
            (Phase::Ready, Some(Signs { is_restarting: true, ..well }), "ok"),
            (Phase::Ready, Some(Signs { stalled: Some(Duration::from_secs(99)), ..well }), "ok"),
            (Phase::Ready, Some(Signs { is_running: false, ..well }), "stopped"),
            (Phase::Loading, Some(well), "loading"),
            (Phase::Draining, Some(Signs { is_running: false, ..well }), "draining"),
        ] {
            assert_eq!(readiness(phase, engine), expected, "{phase:?}");
        }
    }

    #[test]
    fn only_a_server_that_gets_somewhere_is_well() {
        let stuck = Duration::from_secs(30);
        let well = Signs { is_running: true, is_restarting: false, stalled: None };
        let stalled = |seconds| Signs { stalled: Some(Duration::from_secs(seconds)), ..well };
        for (phase, engine, expected) in [
            (Phase::Ready, Some(well), "ok"),
            (Phase::Ready, Some(stalled(30)), "ok"),
            (Phase::Ready, Some(stalled(31)), "stuck"),
            (Phase::Ready, Some(Signs { is_restarting: true, ..stalled(31) }), "restarting"),
            (Phase::Ready, Some(Signs { is_running: false, ..well }), "stopped"),
            (Phase::Ready, None, "loading"),
            (Phase::Loading, None, "loading"),
            (Phase::Loading, Some(well), "loading"),
            (Phase::Draining, Some(well), "draining"),
            (Phase::Draining, Some(stalled(31)), "draining"),
        ] {
            assert_eq!(status(phase, engine, stuck), expected, "{phase:?}");
            assert!(STATUSES.contains(&expected));
        }
        assert_eq!(answer("ok").0, StatusCode::OK);
        assert!(STATUSES[1..].iter().all(|status| answer(status).0 == StatusCode::SERVICE_UNAVAILABLE));
    }
}
