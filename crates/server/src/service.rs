//! State of the routes: the service once the model is loaded, and the app around it.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use folio_engine::Engine;
use folio_text::{ChatTemplate, Tokenizer};

use crate::body_memory::BodyMemory;
use crate::error::{ApiError, ErrorStyle};
use crate::guard::{Caller, InFlightCounts, Lifecycle, RequestId};
use crate::net::ConnectionStats;
use crate::observe::Observer;
use crate::request::{Bounds, ModelNames, SamplingDefaults};
use crate::routes::responses::ResponseStore;
use crate::text_pool::TextPool;
use crate::{Limits, Timeouts};

/// A model that is loaded and the engine that runs it.
pub struct Model {
    pub engine: Engine,
    pub tokenizer: Arc<Tokenizer>,
    /// Models without a chat template serve completions only.
    pub template: Option<Arc<ChatTemplate>>,
    /// Names that clients may use for it.
    pub names: ModelNames,
    /// Defaults for requests, from the model's generation_config.json.
    pub defaults: SamplingDefaults,
    /// Token ids lie below this.
    pub vocab_size: usize,
    /// Sequences that run at once.
    pub max_seqs: usize,
    /// Whether it can turn texts into vectors.
    pub embeds: bool,
    /// Configuration that `/server_info` reports, as the command line knows it: an object.
    /// `block_size`, the tokens of a KV block, and `hidden_size`, the length of an embedding, are
    /// read from it too.
    pub info: serde_json::Value,
}

impl Model {
    /// Tokens of a KV block; 0 where that is not known.
    pub fn block_tokens(&self) -> usize {
        self.info_count("block_size").unwrap_or(0)
    }

    /// The length of an embedding, where that is known.
    pub fn embedding_size(&self) -> Option<usize> {
        self.info_count("hidden_size")
    }

    fn info_count(&self, name: &str) -> Option<usize> {
        self.info.get(name)?.as_u64().and_then(|count| usize::try_from(count).ok())
    }
}

/// The guard and the connections around the routes, for the routes that report on them.
pub struct Surroundings {
    pub in_flight: InFlightCounts,
    pub connections: Arc<ConnectionStats>,
    /// Whether a client needs a key.
    pub needs_key: bool,
}

/// Everything a route needs once the model is there. Cheap to clone.
#[derive(Clone)]
pub struct Service(Arc<Serving>);

pub struct Serving {
    pub model: Model,
    pub bounds: Bounds,
    pub timeouts: Timeouts,
    pub text_pool: TextPool,
    pub observer: Observer,
    pub responses: ResponseStore,
    /// The answer of `/openapi.json`, written at the first request.
    pub openapi: OnceLock<Bytes>,
    /// Start of the server, in Unix seconds.
    pub started: u64,
}

impl Deref for Service {
    type Target = Serving;

    fn deref(&self) -> &Serving {
        &self.0
    }
}

impl Serving {
    pub fn model_name(&self) -> &str {
        &self.model.names.listed[0]
    }
}

/// The router's state: there before the model is, so that a server can say that it is loading.
#[derive(Clone)]
pub struct App(Arc<AppState>);

struct AppState {
    limits: Limits,
    body_memory: BodyMemory,
    timeouts: Timeouts,
    lifecycle: Lifecycle,
    observer: Observer,
    service: OnceLock<Service>,
    surroundings: OnceLock<Surroundings>,
    started: u64,
}

impl App {
    pub fn new(limits: Limits, timeouts: Timeouts, lifecycle: Lifecycle, observer: Observer) -> Self {
        let (service, surroundings, started) = (OnceLock::new(), OnceLock::new(), crate::unix_seconds());
        let body_memory = BodyMemory::new(limits.body_memory, limits.body_bytes);
        Self(Arc::new(AppState { limits, body_memory, timeouts, lifecycle, observer, service, surroundings, started }))
    }

    /// The model is there: from now on requests are answered.
    ///
    /// # Panics
    /// If one is there already.
    pub fn set_model(&self, model: Model) {
        let state = &*self.0;
        assert!(!model.names.listed.is_empty(), "a model has a name");
        let bounds = Bounds {
            limits: state.limits.clone(),
            model_names: model.names.clone(),
            max_model_len: model.engine.max_model_len(),
            vocab_size: model.vocab_size,
            max_seqs: model.max_seqs,
            defaults: model.defaults,
        };
        let serving = Serving {
            text_pool: TextPool::new(
                Arc::clone(&model.tokenizer),
                model.template.clone(),
                &bounds,
                state.timeouts.queue,
            ),
            responses: ResponseStore::new(state.limits.stored_responses, state.limits.stored_response_bytes),
            openapi: OnceLock::new(),
            timeouts: state.timeouts.clone(),
            observer: state.observer.clone(),
            started: state.started,
            model,
            bounds,
        };
        assert!(state.service.set(Service(Arc::new(serving))).is_ok(), "one model is served");
        state.lifecycle.set_ready();
    }

    pub fn service(&self) -> Option<&Service> {
        self.0.service.get()
    }

    /// Sets the guard and connections around the routes. Only the first call counts.
    pub fn set_surroundings(&self, surroundings: Surroundings) {
        // A second word would come from a second server around the same routes; the first one's
        // figures go on.
        let _ = self.0.surroundings.set(surroundings);
    }

    pub fn surroundings(&self) -> Option<&Surroundings> {
        self.0.surroundings.get()
    }

    /// Requests in flight, counted by the guard or, without one, by the engine.
    pub fn num_in_flight(&self) -> usize {
        match self.surroundings() {
            Some(surroundings) => surroundings.in_flight.all(),
            None => self.service().map_or(0, |service| service.model.engine.num_live()),
        }
    }

    pub fn lifecycle(&self) -> &Lifecycle {
        &self.0.lifecycle
    }

    pub fn limits(&self) -> &Limits {
        &self.0.limits
    }

    pub fn body_memory(&self) -> &BodyMemory {
        &self.0.body_memory
    }

    pub fn timeouts(&self) -> &Timeouts {
        &self.0.timeouts
    }

    pub fn observer(&self) -> &Observer {
        &self.0.observer
    }

    /// When the server is overloaded: how long until a request that came now would run.
    pub fn expected_wait(&self) -> Duration {
        self.service().map_or(Duration::from_secs(1), |service| service.model.engine.stats().expected_wait)
    }
}

impl FromRequestParts<App> for Service {
    type Rejection = ApiError;

    async fn from_request_parts(_: &mut Parts, app: &App) -> Result<Self, ApiError> {
        app.service().cloned().ok_or(ApiError::Loading)
    }
}

/// A request's caller, its id and its arrival.
#[derive(Clone)]
pub struct Call {
    pub caller: Caller,
    pub id: RequestId,
    pub arrived: Instant,
    /// How its route writes errors.
    pub style: ErrorStyle,
    pub traceparent: Option<Arc<str>>,
}

impl FromRequestParts<App> for Call {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &App) -> Result<Self, ApiError> {
        let traceparent = parts.headers.get("traceparent").and_then(|header| header.to_str().ok());
        Ok(Self {
            // A router without a guard is one that the process itself calls.
            caller: parts.extensions.get().cloned().unwrap_or_else(|| Caller::anonymous(usize::MAX)),
            id: parts.extensions.get().cloned().ok_or(ApiError::Failed("the request has no id"))?,
            arrived: Instant::now(),
            style: ErrorStyle::of_path(parts.uri.path()),
            traceparent: traceparent.map(Into::into),
        })
    }
}
