//! A server whose model continues the alphabet, and a client of a few lines.

use std::{
    collections::HashMap,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use folio_engine::{
    Background, Engine, EngineConfig, GroupConfig, RequestId, Result, RowOutput, SamplingState, StepPlan, StepRunner,
};
use folio_server::guard::{Guard, GuardConfig, Keys, Lifecycle, protect};
use folio_server::net::{self, NetConfig, Shutdown, ShutdownHandle};
use folio_server::observe::Observer;
use folio_server::{App, Limits, Model, SamplingDefaults, Timeouts, router};
use folio_text::{ChatTemplate, SpecialTokens, Tokenizer};
use serde_json::{Value, json};

/// Letters are 0 to 25. A row after this token is not a number.
pub const BROKEN: u32 = 26;
const WIDTH: usize = 27;

struct Alphabet {
    /// What samples, and the token it sampled last.
    states: HashMap<RequestId, (SamplingState, u32)>,
    /// How long a step takes.
    pace: Duration,
}

impl StepRunner for Alphabet {
    fn admit(&mut self, id: RequestId, state: SamplingState) {
        self.states.insert(id, (state, 0));
    }

    fn run(&mut self, plan: &StepPlan) -> Result<Vec<RowOutput>> {
        std::thread::sleep(self.pace);
        let outputs = plan.assignments.iter().map(|a| {
            let mut output = RowOutput::new(a.id);
            let (state, sampled) = self.states.get_mut(&a.id).expect("admitted");
            let last = if a.awaits_token { *sampled } else { *a.tokens.last().expect("a token") };
            let mut logits = [0.0; WIDTH];
            // Half of them are ruled out, so that the 20 best hold some that are.
            logits[13..].fill(f32::NEG_INFINITY);
            logits[(last as usize + 1) % 26] = if last == BROKEN { f32::NAN } else { 8.0 };
            if a.samples {
                match state.sample(&mut logits, a.first + a.num_rows()) {
                    Ok(found) => {
                        *sampled = found.token;
                        output.sampled = Some(found);
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

fn tokenizer() -> Tokenizer {
    let letter = |id: u8| (char::from(b'a' + id).to_string(), json!(id));
    let mut vocab: serde_json::Map<String, Value> = (0..26).map(letter).collect();
    vocab.insert("!".into(), json!(BROKEN));
    let file = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Tokenizer::from_json(file.to_string().as_bytes()).expect("a sound file")
}

/// What a server under test is started with.
pub struct Setup {
    /// How long a step takes.
    pub pace: Duration,
    pub limits: Limits,
    pub timeouts: Timeouts,
    /// As a key file has them; none: everybody may ask.
    pub keys: &'static str,
}

impl Default for Setup {
    fn default() -> Self {
        Self { pace: Duration::ZERO, limits: Limits::default(), timeouts: Timeouts::default(), keys: "" }
    }
}

pub struct Server {
    pub engine: Engine,
    pub app: App,
    address: SocketAddr,
    /// Serving ends with it.
    _shutdown: ShutdownHandle,
}

pub fn start(pace: Duration) -> Server {
    start_with(Setup { pace, ..Setup::default() })
}

pub fn start_with(setup: Setup) -> Server {
    let config = EngineConfig {
        max_seqs: 4,
        max_waiting: 4,
        max_model_len: 4096,
        groups: vec![GroupConfig::new(1024)],
        logits_width: WIDTH,
        ..EngineConfig::default()
    };
    let executor = Background::start(Alphabet { states: HashMap::new(), pace: setup.pace }).expect("a thread");
    let engine = Engine::start(Box::new(executor), config).expect("a sound configuration");
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
    let lifecycle = Lifecycle::new();
    let app =
        App::new(setup.limits.clone(), setup.timeouts.clone(), lifecycle.clone(), Observer::quiet("alphabet", 4096));
    app.set_model(Model {
        engine: engine.clone(),
        tokenizer: Arc::new(tokenizer()),
        template: Some(Arc::new(ChatTemplate::new(template, SpecialTokens::default()).expect("sound"))),
        names: vec!["alphabet".into()],
        defaults: SamplingDefaults { temperature: Some(0.0), ..SamplingDefaults::default() },
        vocab_size: WIDTH,
        max_seqs: 4,
        embeds: false,
        info: json!({}),
    });
    let mut keys = Keys::none();
    if !setup.keys.is_empty() {
        keys.add_text(setup.keys).expect("sound keys");
    }
    let guard = Guard::new(GuardConfig { keys, limits: setup.limits.clone(), ..GuardConfig::new(lifecycle) });
    let router = protect(router(app.clone()), guard);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let address = listener.local_addr().expect("bound");
    let net = NetConfig::from((&setup.limits, &setup.timeouts));
    let (shutdown, ends) = Shutdown::new();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
            net::serve(net::Listener::Tcp(listener), router, net, ends).await
        })
    });
    Server { engine, app, address, _shutdown: shutdown }
}

impl Server {
    /// Sends a request and leaves the answer unread.
    pub fn open(&self, method: &str, path: &str, body: &[u8]) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).expect("it listens");
        socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a socket");
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all(head.as_bytes()).expect("it reads");
        // A server that has refused already may not read the rest.
        let _ = socket.write_all(body);
        socket
    }

    /// Status and body, as they came.
    pub fn raw(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let mut answer = Vec::new();
        let _ = self.open(method, path, body).read_to_end(&mut answer);
        let answer = String::from_utf8(answer).expect("text");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        (head[9..12].parse().expect("a status"), body.to_owned())
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, body) = self.raw("POST", path, body.to_string().as_bytes());
        (status, serde_json::from_str(&body).expect("JSON"))
    }

    /// The data of every event.
    pub fn events(&self, path: &str, body: &Value) -> Vec<String> {
        let (status, body) = self.raw("POST", path, body.to_string().as_bytes());
        assert_eq!(status, 200, "{body}");
        body.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }
}

pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::yield_now();
    }
}
