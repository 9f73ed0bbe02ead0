//! Medusa: head `i` predicts the token `i + 2` positions behind a row, from that row's state behind
//! the last norm.
//!
//! A head is one or more residual blocks, `x + silu(W x + b)`, and an output matrix: its own, or
//! the decoder's if the file has none; then one product reads that large matrix once for all heads.
//! Backends have silu only as half of a gated block, so the other half is ones, written once.

use folio_device::{Activation, Backend, Product, TensorKind};
use folio_formats::WeightSource;

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
    /// State of one head. [rows, hidden]
    state: B::Tensor,
    branch: B::Tensor,
    /// The branch, and ones beside it. [rows, 2 hidden]
    gate_up: B::Tensor,
    gated: B::Tensor,
    /// States of all heads that share the decoder's output matrix, head by head. [heads * rows,
    /// hidden]
    states: B::Tensor,
    /// [heads * rows, vocab]
    logits: B::Tensor,
    most_rows: usize,
    num_rows: usize,
    memory: MemoryUse,
}

struct Head<B: Backend> {
    blocks: Vec<Linear<B>>,
    /// None if the decoder's output matrix is the head's.
    output: Option<Linear<B>>,
}

impl<B: Backend> Medusa<B> {
    /// Heads for this decoder, sized for drafts behind `most_rows` rows at once.
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
        source.check()?;
        let weights = heads.iter().map(|head| head.bytes(backend)).sum();
        let shared = heads.iter().filter(|head| head.output.is_none()).count();
        let mut room = Room { backend, bytes: 0 };
        let mut tensor = |rows, cols, kind| room.tensor(rows, cols, kind);
        let mut gate_up = tensor(most_rows, 2 * hidden, TensorKind::Activation)?;
        let medusa = Self {
            base: tensor(most_rows, hidden, TensorKind::Stream)?,
            state: tensor(most_rows, hidden, TensorKind::Stream)?,
            branch: tensor(most_rows, hidden, TensorKind::Activation)?,
            gated: tensor(most_rows, hidden, TensorKind::Activation)?,
            states: tensor(shared.max(1) * most_rows, hidden, TensorKind::Stream)?,
            logits: tensor(shared.max(1) * most_rows, vocab, TensorKind::Scores)?,
            memory: MemoryUse { weights, kv: 0, activations: room.bytes },
            heads,
            gate_up: {
                backend.upload_rows(&mut gate_up, &vec![1.0; most_rows * 2 * hidden]);
                gate_up
            },
            most_rows,
            num_rows: 0,
        };
        Ok(medusa)
    }

    /// Most rows that may be drafted behind at once.
    pub fn most_rows(&self) -> usize {
        self.most_rows
    }

    pub fn num_heads(&self) -> usize {
        self.heads.len()
    }

    pub fn memory(&self) -> MemoryUse {
        self.memory
    }

    /// Sets the states that the next drafts start from: those of output rows of the decoder's last
    /// step, numbered as in `batch.outputs`.
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

    /// Logits of the first `heads` heads, `[heads, rows of the last start, vocab]`, into `out`.
    pub fn logits(&mut self, decoder: &mut Decoder<B>, heads: usize, out: &mut Vec<f32>) -> Result<()> {
        let Lent { backend, spec, output, .. } = decoder.lend();
        let rows = self.num_rows;
        out.clear();
        if rows == 0 {
            return Ok(());
        }
        let (mut shared, mut own, mut values) = (0, Vec::new(), Vec::new());
        for (number, head) in self.heads[..heads].iter().enumerate() {
            backend.copy_columns(&mut self.state, 0, &self.base, rows);
            for block in &head.blocks {
                block.forward(backend, &mut self.branch, &self.state, rows);
                backend.copy_columns(&mut self.gate_up, 0, &self.branch, rows);
                backend.gate(&mut self.gated, &self.gate_up, Activation::Silu, rows);
                backend.add(&mut self.state, &self.gated, 1.0, rows);
            }
            match &head.output {
                Some(output) => {
                    output.forward(backend, &mut self.logits, &self.state, rows);
                    backend.download(&self.logits, rows, &mut values);
                    own.push((number, std::mem::take(&mut values)));
                }
                None => {
                    let pairs: Vec<(u32, u32)> =
                        (0..rows as u32).map(|row| (row, shared * rows as u32 + row)).collect();
                    backend.copy_rows(&mut self.states, &self.state, &pairs);
                    shared += 1;
                }
            }
        }
        if shared > 0 {
            let (rows, Product { weight, bias }) = (shared as usize * rows, output);
            backend.linear(&mut self.logits, &self.states, weight, bias, rows);
            if spec.logit_scale != 1.0 || spec.logit_soft_cap.is_some() {
                backend.finish_logits(&mut self.logits, spec.logit_scale, spec.logit_soft_cap, rows);
            }
            backend.download(&self.logits, rows, out);
        }
        // Few files have heads of both kinds; then the number of each decides its position.
        for (number, values) in own {
            let at = number * values.len();
            out.splice(at..at, values);
        }
        Ok(backend.check()?)
    }
}

impl<B: Backend> Head<B> {
    fn load(backend: &mut B, stored: &Stored<'_>, stem: &str, hidden: usize, vocab: usize) -> Result<Self> {
        let mut blocks = Vec::new();
        while blocks.is_empty() || stored.has(&format!("{stem}.{}.linear.weight", blocks.len())) {
            blocks.push(stored.linear(backend, &format!("{stem}.{}.linear", blocks.len()), hidden, hidden)?);
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
