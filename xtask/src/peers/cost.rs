//! The least work of a model, computed from its tensors, and the machine's best rate for it.

use anyhow::Result;
use folio_formats::WeightSource;
use folio_formats::gguf::Gguf;
use folio_measure::rates;

use super::question::{DECODE_TOKENS, Question, STREAM_PROMPT, STREAM_TOKENS};

/// Costs of one model; the head counts once, even if its table is the embeddings' too.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    dense_bytes: f64,
    /// Bytes of all experts.
    expert_bytes: f64,
    /// Multiply-adds of a token in the layers; of the experts, only those it is sent to count.
    layer_macs: f64,
    head_macs: f64,
    /// Multiply-adds of a token for each position it attends to.
    attention_macs: f64,
    /// Keys and values of a position, two bytes each.
    kv_bytes: f64,
    /// The share of the experts that a token is sent to.
    experts_used: f64,
    is_quantized: bool,
}

impl Cost {
    pub fn of(gguf: &Gguf) -> Result<Self> {
        let architecture = gguf.str("general.architecture")?;
        let count = |key: &str| gguf.u32(&format!("{architecture}.{key}")).map(f64::from);
        let (layers, heads) = (count("block_count")?, count("attention.head_count")?);
        let head_dim =
            count("attention.key_length").or_else(|_| Ok::<_, anyhow::Error>(count("embedding_length")? / heads))?;
        let mut cost = Self {
            attention_macs: 2.0 * layers * heads * head_dim,
            kv_bytes: 4.0 * layers * count("attention.head_count_kv")? * head_dim,
            experts_used: count("expert_used_count").and_then(|used| Ok(used / count("expert_count")?)).unwrap_or(1.0),
            ..Self::default()
        };
        let is_tied = gguf.tensor("output.weight").is_none();
        for name in gguf.names() {
            let tensor = gguf.require(name)?;
            let (bytes, values) = (tensor.bytes.len() as f64, tensor.shape.iter().product::<usize>() as f64);
            cost.is_quantized |= tensor.format.is_quantized();
            match name {
                "token_embd.weight" if !is_tied => {}
                "token_embd.weight" | "output.weight" => {
                    cost.dense_bytes += bytes;
                    cost.head_macs += values;
                }
                _ if name.contains("_exps.") => {
                    cost.expert_bytes += bytes;
                    cost.layer_macs += values * cost.experts_used;
                }
                _ => {
                    cost.dense_bytes += bytes;
                    cost.layer_macs += if tensor.shape.len() > 1 { values } else { 0.0 };
                }
            }
        }
        Ok(cost)
    }

    /// Parameters that a token is multiplied with.
    pub fn parameters(&self) -> f64 {
        self.layer_macs + self.head_macs
    }

    /// Bytes read by a step of `streams` streams, each behind `context` tokens, that choose their
    /// experts evenly.
    fn step_bytes(&self, streams: usize, context: usize) -> f64 {
        let experts = 1.0 - (1.0 - self.experts_used).powi(streams as i32);
        self.dense_bytes + self.expert_bytes * experts + self.kv_bytes * (streams * context) as f64
    }

    /// Operations of one decoded token, two per multiply-add.
    fn decode_operations(&self, context: usize) -> f64 {
        2.0 * (self.layer_macs + self.head_macs + self.attention_macs * context as f64)
    }

    /// Operations of a prompt; the head runs on its last token only.
    fn prompt_operations(&self, tokens: usize) -> f64 {
        let positions = (tokens * (tokens + 1) / 2) as f64;
        2.0 * (self.layer_macs * tokens as f64 + self.head_macs + self.attention_macs * positions)
    }

    /// The most tokens a second that the machine allows, and its limit: reading or computing.
    pub fn bound(&self, question: Question, size: usize, ceilings: &Ceilings) -> (f64, &'static str) {
        let (peak, of_peak) = match self.is_quantized {
            true => (ceilings.int8_ops, "int8 peak"),
            false => (ceilings.bf16_flops, "bf16 peak"),
        };
        if question == Question::Prefill {
            return (size as f64 * peak / self.prompt_operations(size), of_peak);
        }
        let (streams, context) = halfway(question, size);
        let read = streams as f64 * ceilings.read_bytes_per_s / self.step_bytes(streams, context);
        let computed = peak / self.decode_operations(context);
        if read < computed { (read, "read") } else { (computed, of_peak) }
    }

    /// For each size, the shares of the read bandwidth for these tokens per byte; empty unless one
    /// stream decodes.
    pub fn of_read(&self, question: Question, tokens_per_byte: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let shares = |(size, pairs): (&usize, &Vec<f64>)| {
            let (streams, context) = halfway(question, *size);
            if !matches!(question, Question::Decode | Question::Streams) || streams > 1 {
                return Vec::new();
            }
            let bytes = self.step_bytes(1, context);
            pairs.iter().map(|pair| pair * bytes).collect()
        };
        question.sizes().iter().zip(tokens_per_byte).map(shares).collect()
    }
}

/// Number of decoding streams, and tokens before each in the middle of its answer.
fn halfway(question: Question, size: usize) -> (usize, usize) {
    match question {
        Question::Streams => (size, STREAM_PROMPT + STREAM_TOKENS / 2),
        _ => (1, size + DECODE_TOKENS / 2),
    }
}

/// The machine's peaks so far, as Folio's benches measure them before, between and after their
/// rounds.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    pub read_bytes_per_s: f64,
    pub bf16_flops: f64,
    pub int8_ops: f64,
    /// The lowest of the processes' best reads: it shows how far the bandwidth moved.
    pub read_lowest: f64,
}

impl Ceilings {
    pub fn none() -> Self {
        Self { read_bytes_per_s: 0.0, bf16_flops: 0.0, int8_ops: 0.0, read_lowest: f64::INFINITY }
    }

    pub fn take(&mut self, found: &rates::Ceilings) {
        self.read_bytes_per_s = self.read_bytes_per_s.max(found.read_bytes_per_s);
        self.read_lowest = self.read_lowest.min(found.read_bytes_per_s);
        self.bf16_flops = self.bf16_flops.max(found.bf16_flops);
        self.int8_ops = self.int8_ops.max(found.other("int8 operations").unwrap_or(0.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_those_of_the_ceiling_that_binds() {
        let mut ceilings = Ceilings::none();
        let int8 = rates::Ceiling { what: "int8 operations".into(), per_s: 900e9 };
        ceilings.take(&rates::Ceilings { read_bytes_per_s: 30e9, bf16_flops: 400e9, others: vec![int8] });
        let mut cost =
            Cost { dense_bytes: 1e9, layer_macs: 0.9e9, head_macs: 0.1e9, is_quantized: true, ..Cost::default() };
        assert_eq!(cost.bound(Question::Decode, 0, &ceilings), (30.0, "read"));
        assert_eq!(cost.bound(Question::Streams, 64, &ceilings), (450.0, "int8 peak"));
        let (prompt, of) = cost.bound(Question::Prefill, 512, &ceilings);
        assert!((499.0..500.0).contains(&prompt) && of == "int8 peak", "{prompt} of {of}");
        // Two of eight experts: two streams read 7/16 of them, not half.
        (cost.expert_bytes, cost.experts_used) = (1.6e9, 0.25);
        assert_eq!(cost.step_bytes(2, 0), 1.7e9);
    }

    #[test]
    fn tokens_a_byte_are_shares_by_what_a_step_reads() {
        // After 0 and 1,024 tokens, and half of 64 more.
        let cost = Cost { dense_bytes: 1000.0, kv_bytes: 1.0, ..Cost::default() };
        let shares = cost.of_read(Question::Decode, &[vec![0.5, 0.25], vec![0.5]]);
        assert_eq!(shares, [vec![516.0, 258.0], vec![1028.0]]);
        let halves = |sizes: usize| vec![vec![0.5]; sizes];
        let streams = cost.of_read(Question::Streams, &halves(7));
        assert!(streams[0] == [516.0] && streams[1..].iter().all(Vec::is_empty), "{streams:?}");
        assert!(cost.of_read(Question::Prefill, &halves(3)).iter().all(Vec::is_empty));
        assert!(cost.of_read(Question::Decode, &[]).is_empty());
    }
}
