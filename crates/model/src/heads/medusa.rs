//! Medusa: head `i` guesses the token `i + 2` places behind a row, from that row's state behind the last norm.
//!
//! A head is one or more residual blocks, `x + silu(W x + b)`, and an output matrix: its own, or the decoder's where the
//! file has none. Backends know silu as half of a gated block, so `W` is loaded above as many zero rows whose bias is one:
//! `silu(W x + b) * 1`. That doubles a matrix which is small beside the output matrix, and needs no operation of its own.

use std::borrow::Cow;

use folio_device::{Activation, Backend, Product, TensorKind};
use folio_formats::{Format, Matrix, WeightSource};

use super::stored::{Room, Stored};
use crate::{
    Decoder, MemoryUse, Result,
    decoder::{Lent, check},
    linear::Linear,
};

const FAMILY: &str = "a file of Medusa heads";

pub struct Medusa<B: Backend> {
    heads: Vec<Head<B>>,
    /// States that the heads start from. [rows, hidden]
    base: B::Tensor,
    /// A head's own. [rows, hidden]
    state: B::Tensor,
    gate_up: B::Tensor,
    gated: B::Tensor,
    /// [rows, vocab]
    logits: B::Tensor,
    most_rows: usize,
    num_rows: usize,
    memory: MemoryUse,
}

struct Head<B: Backend> {
    blocks: Vec<Linear<B>>,
    /// None where the decoder's output matrix is the head's.
    output: Option<Linear<B>>,
}

impl<B: Backend> Medusa<B> {
    /// Heads for this decoder, sized for guesses behind `most_rows` rows at once.
    pub fn load(decoder: &mut Decoder<B>, source: &dyn WeightSource, most_rows: usize) -> Result<Self> {
        let Lent { backend, spec, .. } = decoder.lend();
        let (hidden, vocab) = (spec.hidden, spec.vocab_size);
        let stored = Stored::new(source, FAMILY);
        let prefix = if stored.has("0.0.linear.weight") { "" } else { "medusa_head." };
        let mut heads = Vec::new();
        while heads.is_empty() || stored.has(&format!("{prefix}{}.0.linear.weight", heads.len())) {
            heads.push(Head::load(backend, &stored, &format!("{prefix}{}", heads.len()), hidden, vocab)?);
        }
        source.names().into_iter().for_each(|name| source.release(name));
        let weights = heads.iter().map(|head| head.bytes(backend)).sum();
        let mut room = Room { backend, bytes: 0 };
        let mut tensor = |cols, kind| room.tensor(most_rows, cols, kind);
        Ok(Self {
            heads,
            base: tensor(hidden, TensorKind::Stream)?,
            state: tensor(hidden, TensorKind::Stream)?,
            gate_up: tensor(2 * hidden, TensorKind::Activation)?,
            gated: tensor(hidden, TensorKind::Activation)?,
            logits: tensor(vocab, TensorKind::Scores)?,
            most_rows,
            num_rows: 0,
            memory: MemoryUse { weights, kv: 0, activations: room.bytes },
        })
    }

    pub fn num_heads(&self) -> usize {
        self.heads.len()
    }

    pub fn memory(&self) -> MemoryUse {
        self.memory
    }

    /// The states that the next guesses start from: these of the output rows of the decoder's last step, counted as
    /// `batch.outputs` lists them.
    pub fn start(&mut self, decoder: &mut Decoder<B>, outputs: &[u32]) -> Result<()> {
        self.num_rows = 0;
        check::most("the number of rows to guess behind", outputs.len(), self.most_rows)?;
        check::most("an output row", outputs.iter().max().map_or(0, |&row| row as usize + 1), decoder.num_outputs())?;
        let Lent { backend, hidden, .. } = decoder.lend();
        let pairs: Vec<(u32, u32)> = outputs.iter().copied().zip(0..).collect();
        backend.copy_rows(&mut self.base, hidden, &pairs);
        self.num_rows = outputs.len();
        Ok(())
    }

    /// Logits of one head, `[rows of the last start, vocab]`, into `out`.
    pub fn logits(&mut self, decoder: &mut Decoder<B>, head: usize, out: &mut Vec<f32>) -> Result<()> {
        let Lent { backend, spec, output, .. } = decoder.lend();
        let (rows, head) = (self.num_rows, &self.heads[head]);
        out.clear();
        if rows == 0 {
            return Ok(());
        }
        backend.copy_columns(&mut self.state, 0, &self.base, rows);
        for block in &head.blocks {
            block.forward(backend, &mut self.gate_up, &self.state, rows);
            backend.gate(&mut self.gated, &self.gate_up, Activation::Silu, rows);
            backend.add(&mut self.state, &self.gated, 1.0, rows);
        }
        match &head.output {
            Some(own) => own.forward(backend, &mut self.logits, &self.state, rows),
            None => {
                let Product { weight, bias } = output;
                backend.linear(&mut self.logits, &self.state, weight, bias, rows);
                if spec.logit_scale != 1.0 || spec.logit_soft_cap.is_some() {
                    backend.finish_logits(&mut self.logits, spec.logit_scale, spec.logit_soft_cap, rows);
                }
            }
        }
        backend.download(&self.logits, rows, out);
        Ok(backend.check()?)
    }
}

impl<B: Backend> Head<B> {
    fn load(backend: &mut B, stored: &Stored<'_>, stem: &str, hidden: usize, vocab: usize) -> Result<Self> {
        let mut blocks = Vec::new();
        while blocks.is_empty() || stored.has(&format!("{stem}.{}.linear.weight", blocks.len())) {
            blocks.push(block(backend, stored, &format!("{stem}.{}.linear", blocks.len()), hidden)?);
        }
        let output = format!("{stem}.{}", blocks.len());
        let own = stored.has(&format!("{output}.weight"));
        let output = own.then(|| stored.linear(backend, &output, vocab, hidden)).transpose()?;
        Ok(Self { blocks, output })
    }

    fn bytes(&self, backend: &B) -> u64 {
        self.blocks.iter().chain(&self.output).map(|linear| linear.bytes(backend)).sum()
    }
}

/// A gated block whose gate is the stored matrix and whose other half is one.
fn block<B: Backend>(backend: &mut B, stored: &Stored<'_>, stem: &str, hidden: usize) -> Result<Linear<B>> {
    let gate = stored.matrix(&format!("{stem}.weight"), hidden, hidden)?;
    let format = gate.format().unwrap_or(Format::F32);
    let zeros = vec![0u8; hidden * format.block_bytes()];
    let ones = Matrix::from_rows(format, hidden, vec![Cow::Owned(zeros); hidden])?;
    let mut bias = stored.vector(&format!("{stem}.bias"), hidden)?;
    bias.resize(2 * hidden, 1.0);
    Linear::new(backend, &Matrix::stack(vec![gate, ones])?, Some(&bias))
}
