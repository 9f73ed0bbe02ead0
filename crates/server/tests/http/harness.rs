//! A server whose model continues the alphabet, and a client of a few lines.

use std::{
    collections::HashMap,
    io::Write,
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::Duration,
};

use folio_engine::{
    Admission, Assignment, Background, Engine, EngineConfig, GroupConfig, RequestId, Result, RowOutput, SamplingState,
    StepPlan, StepRunner,
};
use folio_server::guard::{Guard, GuardConfig, Keys, Lifecycle, protect};
use folio_server::net::{self, ConnectionStats, NetConfig, Shutdown, ShutdownHandle};
use folio_server::observe::Observer;
use folio_server::{App, Limits, Model, ModelNames, SamplingDefaults, Timeouts, router};
use folio_testing::http::{self, Connection, Pace};
use folio_text::{ChatTemplate, SpecialTokens, Tokenizer};
use serde_json::{Value, json};

/// Letters are 0 to 25. A row after this token is not a number.
pub const BROKEN: u32 = 26;
const WIDTH: usize = 27;
/// With [`Setup::all_bytes`]: every byte has a token, and so has the text `<|end|>`, which is
/// special.
pub const WIDE: usize = 257;
/// ... and texts have vectors of this length.
pub const EMBEDDING: usize = 4;

/// The token of a byte, with [`Setup::all_bytes`]: letters and `!` have those they always have.
pub fn token_of(byte: u8) -> u32 {
    match byte {
        b'a'..=b'z' => u32::from(byte - b'a'),
        b'!' => BROKEN,
        _ => {
            let before = |other: &u8| !other.is_ascii_lowercase() && *other != b'!';
            BROKEN + 1 + (0..byte).filter(before).count() as u32
        }
    }
}

/// A step with a row after this byte panics.
pub const STEP_PANIC: u8 = b'#';
/// ... fails.
pub const STEP_ERROR: u8 = b'%';
/// A row after this byte fails as one does whose sampler panicked.
pub const ROW_FAILURE: u8 = b'$';

struct Alphabet {
    /// The state of sampling, and the token sampled last.
    states: HashMap<RequestId, (SamplingState, u32)>,
    /// How long a step takes.
    pace: Duration,
    width: usize,
}

impl Alphabet {
    /// The token that a row comes after.
    fn last(&self, a: &Assignment) -> u32 {
        if a.awaits_token { self.states[&a.id].1 } else { *a.tokens.last().expect("a token") }
    }

    fn faults(&self, plan: &StepPlan) -> Result<()> {
        let ends_in = |byte: u8| plan.assignments.iter().any(|a| self.last(a) == token_of(byte));
        assert!(!ends_in(STEP_PANIC), "planted panic");
        if ends_in(STEP_ERROR) { Err(folio_engine::Error::Step("planted failure".into())) } else { Ok(()) }
    }
}

impl StepRunner for Alphabet {
    fn admit(&mut self, id: RequestId, admission: Admission) {
        self.states.insert(id, (admission.state, 0));
    }

    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>> {
        std::thread::sleep(self.pace);
        if self.width == WIDE {
            self.faults(plan)?;
        }
        let width = self.width;
        let outputs = plan.assignments.iter().map(|a| {
            let mut output = RowOutput::new(a.id);
            let last = self.last(a);
            let (state, sampled) = self.states.get_mut(&a.id).expect("admitted");
            if width == WIDE && last == token_of(ROW_FAILURE) {
                output.failure = Some("its sampler panicked".into());
                return output;
            }
            let mut logits = vec![0.0; width];
            // Half of them are ruled out, so that the 20 best hold some that are.
            logits[13..].fill(f32::NEG_INFINITY);
            if width == WIDE {
                // Never drawn, unless nothing else is allowed.
                logits[BROKEN as usize..].fill(-1e9);
            }
            logits[(last as usize + 1) % 26] = if last == BROKEN { f32::NAN } else { 8.0 };
            if a.samples && state.pooling().is_some() {
                output.pooled = Some(vec![1.0; EMBEDDING]);
            } else if a.samples {
                match state.sample(&mut logits, a.first + a.num_rows()) {
                    Ok(found) => {
                        state.observe(found.token);
                        *sampled = found.token;
                        output.sampled.push(found);
                    }
                    Err(error) => output.failure = Some(error.to_string()),
                }
            }
            output
        });
        Ok(outputs.collect())
    }

    fn release(&mut self, id: RequestId) {
        self.states.remove(&id);
    }
}

/// As byte-level vocabularies write a byte: those that cannot be seen are moved up.
fn byte_char(byte: u8) -> char {
    let is_plain = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    match is_plain(&byte) {
        true => char::from(byte),
        false => char::from_u32(256 + (0..byte).filter(|other| !is_plain(other)).count() as u32).expect("a letter"),
    }
}

fn tokenizer(all_bytes: bool) -> Tokenizer {
    let known = |byte: &u8| all_bytes || byte.is_ascii_lowercase() || *byte == b'!';
    let entry = |byte: u8| (byte_char(byte).to_string(), json!(token_of(byte)));
    let vocab: serde_json::Map<String, Value> = (0..=255).filter(known).map(entry).collect();
    let end = json!({
        "id": WIDE - 1, "content": "<|end|>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false,
    });
    let added = if all_bytes { vec![end] } else { Vec::new() };
    let file = json!({
        "version": "1.0", "added_tokens": added, "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(file.to_string().as_bytes()).expect("a sound file")
}

/// Configuration of a server under test.
pub struct Setup {
    /// How long a step takes.
    pub pace: Duration,
    pub limits: Limits,
    pub timeouts: Timeouts,
    /// The text of a key file; none: no key is needed.
    pub keys: &'static str,
    pub max_seqs: usize,
    pub max_model_len: usize,
    /// Every byte has a token, and some bring about faults.
    pub all_bytes: bool,
    pub template: &'static str,
    /// Routes besides the server's own.
    pub extra: fn() -> axum::Router,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            pace: Duration::ZERO,
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            keys: "",
            max_seqs: 4,
            max_model_len: 4096,
            all_bytes: false,
            template: "{% for message in messages %}{{ message.content }}{% endfor %}",
            extra: axum::Router::new,
        }
    }
}

pub struct Server {
    pub engine: Engine,
    pub app: App,
    pub address: SocketAddr,
    pub connections: Arc<ConnectionStats>,
    /// Serving ends with it.
    pub shutdown: ShutdownHandle,
}

pub fn start(pace: Duration) -> Server {
    start_with(Setup { pace, ..Setup::default() })
}

pub fn start_with(setup: Setup) -> Server {
    let width = if setup.all_bytes { WIDE } else { WIDTH };
    let config = EngineConfig {
        max_seqs: setup.max_seqs,
        max_waiting: setup.max_seqs,
        max_model_len: setup.max_model_len,
        groups: vec![GroupConfig::new(1024)],
        logits_width: width,
        embedding_width: if setup.all_bytes { EMBEDDING } else { 0 },
        ..EngineConfig::default()
    };
    let executor = Background::start(Alphabet { states: HashMap::new(), pace: setup.pace, width }).expect("a thread");
    let engine = Engine::start(Box::new(executor), config).expect("a sound configuration");
    let lifecycle = Lifecycle::new();
    let app = App::new(
        setup.limits.clone(),
        setup.timeouts.clone(),
        lifecycle.clone(),
        Observer::quiet("alphabet", setup.max_model_len),
    );
    app.set_model(Model {
        engine: engine.clone(),
        tokenizer: Arc::new(tokenizer(setup.all_bytes)),
        template: Some(Arc::new(ChatTemplate::new(setup.template, SpecialTokens::default()).expect("sound"))),
        names: ModelNames { listed: vec!["alphabet".into()], unlisted: vec!["/models/alphabet".into()] },
        defaults: SamplingDefaults { temperature: Some(0.0), ..SamplingDefaults::default() },
        vocab_size: width,
        max_seqs: setup.max_seqs,
        embeds: setup.all_bytes,
        info: if setup.all_bytes { json!({"hidden_size": EMBEDDING}) } else { json!({}) },
    });
    let mut keys = Keys::none();
    if !setup.keys.is_empty() {
        keys.add_text(setup.keys).expect("sound keys");
    }
    let guard = Guard::new(GuardConfig { keys, limits: setup.limits.clone(), ..GuardConfig::new(lifecycle) });
    let router = protect(router(app.clone()).merge((setup.extra)()), guard);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let address = listener.local_addr().expect("bound");
    let net = NetConfig::from((&setup.limits, &setup.timeouts));
    let connections = Arc::clone(&net.stats);
    let (shutdown, ends) = Shutdown::new();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
            net::serve(net::Listener::Tcp(listener), router, net, ends).await
        })
    });
    Server { engine, app, address, connections, shutdown }
}

impl Server {
    /// Sends a request and leaves the answer unread.
    pub fn open(&self, method: &str, path: &str, body: &[u8]) -> TcpStream {
        self.open_with("", method, path, body)
    }

    /// The same with more fields in its header, each with its line's end.
    pub fn open_with(&self, fields: &str, method: &str, path: &str, body: &[u8]) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).expect("it listens");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        // A server that has refused already may not read the rest.
        let _ = socket.write_all(&http::request(method, path, fields, body));
        socket
    }

    /// Status and body, as they came.
    pub fn raw(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let (status, _, body) = read_answer(&mut self.open(method, path, body));
        (status, body)
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.raw("POST", path, body.to_string().as_bytes());
        (status, serde_json::from_str(&body).expect("JSON"))
    }

    /// The data of every event.
    pub fn events(&self, path: &str, body: &Value) -> Vec<String> {
        let (status, body) = self.raw("POST", path, body.to_string().as_bytes());
        assert_eq!(status, 200, "{body}");
        event_data(&body)
    }

    /// The same with this key.
    pub fn events_as(&self, key: &str, path: &str, body: &Value) -> Vec<String> {
        let field = format!("authorization: Bearer {key}\r\n");
        let (status, _, body) = read_answer(&mut self.open_with(&field, "POST", path, body.to_string().as_bytes()));
        assert_eq!(status, 200, "{body}");
        event_data(&body)
    }
}

fn event_data(body: &str) -> Vec<String> {
    body.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
}

/// An answer to its end: status, head and body.
pub fn read_answer(socket: &mut TcpStream) -> (u16, String, String) {
    let reply = Connection::over(socket, Pace::FULL).reply().expect("an answer");
    (reply.status, reply.head, String::from_utf8(reply.body).expect("text"))
}
