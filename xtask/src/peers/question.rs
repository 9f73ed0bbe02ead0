//! The questions to every engine, and how an answer is read.

/// Tokens that a single stream decodes.
pub const DECODE_TOKENS: usize = 64;
/// Tokens of the prompts and answers of streams that decode together.
pub const STREAM_PROMPT: usize = 16;
pub const STREAM_TOKENS: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Folio,
    LlamaCpp,
    OpenVino,
}

impl Engine {
    pub const ALL: [Self; 3] = [Self::Folio, Self::LlamaCpp, Self::OpenVino];

    pub fn name(self) -> &'static str {
        ["Folio", "llama.cpp", "OpenVINO"][self as usize]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    Decode,
    Prefill,
    Streams,
    Http,
    /// Requests at a fixed rate, whether earlier ones have ended or not.
    Load,
    Start,
    Memory,
    /// This and the next question are for Folio alone.
    Context,
    Kv,
}

impl Question {
    pub const ALL: [Self; 9] = [
        Self::Decode,
        Self::Prefill,
        Self::Streams,
        Self::Http,
        Self::Load,
        Self::Start,
        Self::Memory,
        Self::Context,
        Self::Kv,
    ];

    pub fn name(self) -> &'static str {
        ["decode", "prefill", "streams", "http", "load", "start", "memory", "context", "kv"][self as usize]
    }

    pub fn title(self) -> &'static str {
        match self {
            Self::Decode => "Decode of one stream, tokens/s",
            Self::Prefill => "A prompt computed at once, tokens/s",
            Self::Streams => "Decode of 1 to 64 streams together, tokens/s",
            Self::Http => "HTTP, 16 requests at a time (128 tokens in, 64 out)",
            Self::Load => "HTTP, Poisson arrivals (128 tokens in, 64 out), ms",
            Self::Start => "Process start to first token, seconds",
            Self::Memory => "Most memory resident, MiB",
            Self::Context => "Decode of one stream behind 0 to 8,000 tokens, tokens/s",
            Self::Kv => "Decode behind 3,500 tokens, by format of keys and values, tokens/s",
        }
    }

    /// The sizes that distinguish the cases: tokens or streams.
    pub fn sizes(self) -> &'static [usize] {
        match self {
            Self::Decode => &[0, 1024],
            Self::Prefill => &[128, 512, 2048],
            Self::Streams => &[1, 2, 4, 8, 16, 32, 64],
            Self::Context => &[0, 512, 1024, 2048, 4000, 8000],
            _ => &[],
        }
    }

    /// Meaning of each figure of an answer, in order.
    pub fn cases(self) -> &'static [&'static str] {
        match self {
            Self::Decode => &["context 0", "context 1024"],
            Self::Prefill => &["128 tokens", "512 tokens", "2048 tokens"],
            Self::Streams => &["1", "2", "4", "8", "16", "32", "64"],
            Self::Http => &["tokens/s", "TTFT p50 ms", "TTFT p99", "ITL p50 ms", "ITL p99"],
            Self::Load => &["TTFT p50", "TTFT p99", "ITL p50", "ITL p99"],
            Self::Start => &["file in memory", "file on disk"],
            Self::Memory => &["16 requests at a time"],
            Self::Context => &["0", "512", "1024", "2048", "4000", "8000"],
            Self::Kv => &["bfloat16", "int8"],
        }
    }

    /// Whether a higher figure is the better one.
    pub fn is_rate(self, case: usize) -> bool {
        match self {
            Self::Decode | Self::Prefill | Self::Streams | Self::Context | Self::Kv => true,
            Self::Http => case == 0,
            Self::Load | Self::Start | Self::Memory => false,
        }
    }
}
