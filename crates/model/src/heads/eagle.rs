//! EAGLE: one decoder layer that reads the decoder's states beside the token that followed each,
//! and predicts the next token. Two layouts are read, distinguished by their tensors:
//!
//! - **EAGLE-3**: three states of a row, taken before layers 2, L/2 and L-3, are fused into one
//!   (`fc`); the layer attends over `[norm(embedding); norm(state)]`, and a small output matrix of
//!   its own has a draft vocabulary (`d2t`). If the file has no such matrix, it is the decoder's
//!   rows of those tokens.
//! - **EAGLE-1** and 2: `fc` over `[embedding; state]`; the state is the decoder's behind its last
//!   norm. A plain layer follows, and the decoder's output matrix reads its result.
//!
//! Row `p` of a sequence holds the state at position `p` and the token at `p + 1`, and its keys and
//! values have the slot of the decoder's position `p`: the head's storage has at least as many
//! blocks, and a batch for it names the same slots. Behind the last token the head continues from
//! its own states ([`Feature::After`]), one step per level of a [`tree`](folio_device::tree) that
//! grows from step to step: no row is computed twice. Accepted tokens are computed again, from the
//! decoder's states.
//!
//! A model's own layers for multi-token prediction are such a head too: `norm(embedding)` and
//! `norm(state)` side by side through `fc` (`eh_proj`), a layer with keys and values of its own, a
//! norm, and the decoder's output matrix.

mod borrowed;
mod sizes;
mod sources;

use folio_device::{Backend, Batch, InputLimits, Product, TensorKind};
use folio_formats::WeightSource;

use super::layer::DraftLayer;
use super::stored::{Room, Stored};
use crate::{
    Decoder, DecoderLimits, MemoryUse, ModelSpec, Result, RopeSpec,
    decoder::{Lent, check},
    linear::Linear,
};
use borrowed::Reader;
use sizes::{Output, Sizes};
use sources::Sources;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EagleLayout {
    /// EAGLE-1 and EAGLE-2, which grow trees differently and have the same head.
    One,
    Three,
}

/// Source of a row's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feature {
    /// This row of the decoder's last step.
    Decoder(u32),
    /// The head's result for this row of its own last step.
    After(u32),
}

/// Sizes of a head's own steps and storage that exceed the decoder's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EagleRoom {
    /// Blocks of keys and values, at least those of the decoder's group.
    pub blocks: usize,
    /// Most drafted rows of a step.
    pub drafts: usize,
}

pub struct Eagle<B: Backend> {
    layout: EagleLayout,
    spec: ModelSpec,
    /// One group of blocks, the decoder's [`Eagle::group`].
    limits: DecoderLimits,
    group: usize,
    fc: Linear<B>,
    layer: DraftLayer<B>,
    norms: Norms<B>,
    /// None if the decoder's output matrix is the head's.
    output: Option<Linear<B>>,
    /// Whether its logits need the decoder's scaling.
    scales_logits: bool,
    /// Token of each draft id; empty if they are the same.
    tokens: Vec<u32>,
    rope: Option<(RopeSpec, B::Vector)>,
    inputs: B::Inputs,
    acts: Acts<B>,
    num_rows: usize,
    num_outputs: usize,
    memory: MemoryUse,
}

struct Norms<B: Backend> {
    /// Norm of the embedding in EAGLE-3; norm before attention in the other layout, if the layer
    /// has it.
    input: Option<B::Vector>,
    /// Norm of the state.
    hidden: Option<B::Vector>,
    /// Norm before the output matrix.
    last: Option<B::Vector>,
}

struct Acts<B: Backend> {
    /// The decoder's three states of a row, in EAGLE-3. [rows, 3 hidden]
    fused: Option<B::Tensor>,
    /// The head's stream, which starts as the given states; and that of the previous step. [rows,
    /// hidden]
    state: B::Tensor,
    state_before: B::Tensor,
    embedded: B::Tensor,
    normed: B::Tensor,
    /// Embedding and state side by side. [rows, 2 hidden]
    both: B::Tensor,
    /// [outputs, hidden]
    last: B::Tensor,
    last_normed: B::Tensor,
    /// [outputs, draft vocabulary]
    logits: B::Tensor,
}

impl<B: Backend> Eagle<B> {
    /// A head for this decoder, with its sizes; from now on the decoder's states are tapped.
    pub fn load(decoder: &mut Decoder<B>, source: &dyn WeightSource) -> Result<Self> {
        Self::load_with(decoder, source, EagleRoom { blocks: 0, drafts: 0 })
    }

    /// Like [`Eagle::load`], with more room than the decoder's.
    pub fn load_with(decoder: &mut Decoder<B>, source: &dyn WeightSource, room: EagleRoom) -> Result<Self> {
        let stored = Stored::new(source, sizes::FAMILY);
        let sizes = Sizes::of(&stored, decoder.spec())?;
        let group = sizes.group;
        let limits = limits(decoder.limits(), group, room);
        let Lent { backend, spec, embedding, .. } = decoder.lend();
        let spec = spec.clone();
        let fc = stored.linear(backend, &sizes.stem("fc"), spec.hidden, sizes.fused)?;
        let three = sizes.layout == EagleLayout::Three;
        let norm = |backend: &mut B, needed: bool, stem: String| -> Result<Option<B::Vector>> {
            let there = needed || stored.has(&format!("{stem}.weight"));
            there.then(|| stored.norm(backend, &stem, spec.hidden)).transpose()
        };
        let norms = Norms {
            input: norm(backend, three, format!("{}input_layernorm", sizes.layer))?,
            hidden: if three { norm(backend, true, format!("{}hidden_norm", sizes.layer))? } else { None },
            last: if three { norm(backend, true, sizes.stem("norm"))? } else { None },
        };
        let rope = sizes.like.rope.map(|number| spec.ropes[number].clone());
        let rope =
            rope.map(|rope| Ok::<_, crate::Error>((rope.clone(), backend.vector(&rope.inv_freq)?))).transpose()?;
        let mut room = Room { backend, bytes: 0 };
        let layer = DraftLayer::load(&mut room, &stored, &sizes.layer_shape(&spec), &limits)?;
        let mut acts = Acts::new(&mut room, &sizes, spec.hidden, &limits)?;
        let bytes = room.bytes;
        let mut inputs = backend.inputs(InputLimits {
            rows: limits.rows,
            spans: limits.spans,
            outputs: limits.outputs,
            table_entries: limits.table_entries,
            groups: 1,
            ropes: rope.iter().len(),
            rope_pairs: rope.as_ref().map_or(0, |(rope, _)| rope.inv_freq.len()),
        })?;
        let output = match sizes.output {
            Output::Own => Some(stored.linear(backend, "lm_head", sizes.vocab, spec.hidden)?),
            Output::Borrowed => {
                let (inputs, embedded) = (&mut inputs, &mut acts.embedded);
                let reader = Reader { inputs, embedded, hidden: spec.hidden, most_rows: limits.rows };
                let rows = reader.rows(backend, embedding, &sizes.tokens)?;
                Some(Linear::new(backend, &rows, None)?)
            }
            Output::Decoders => None,
        };
        source.names().into_iter().for_each(|name| source.release(name));
        source.check()?;
        let scales_logits = sizes.output != Output::Own;
        let outside: u64 = std::iter::once(&fc).chain(&output).map(|linear| linear.bytes(backend)).sum();
        let memory = MemoryUse {
            weights: outside + layer.weight_bytes(backend),
            kv: layer.kv_bytes(&limits),
            activations: bytes,
        };
        decoder.tap(sizes.tap)?;
        let (layout, tokens) = (sizes.layout, sizes.tokens);
        let (num_rows, num_outputs) = (0, 0);
        Ok(Self {
            layout,
            spec,
            limits,
            group,
            fc,
            layer,
            norms,
            output,
            scales_logits,
            tokens,
            rope,
            inputs,
            acts,
            num_rows,
            num_outputs,
            memory,
        })
    }

    pub fn layout(&self) -> EagleLayout {
        self.layout
    }

    /// The decoder's layer group with the blocks and slots that a batch for the head names, as its
    /// only group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Limits of the head's own steps.
    pub fn limits(&self) -> &DecoderLimits {
        &self.limits
    }

    pub fn memory(&self) -> MemoryUse {
        self.memory
    }

    /// Width of a row of logits.
    pub fn vocab_size(&self) -> usize {
        if self.tokens.is_empty() { self.spec.vocab_size } else { self.tokens.len() }
    }

    /// The token of a column of the logits.
    pub fn token(&self, column: usize) -> u32 {
        if self.tokens.is_empty() { column as u32 } else { self.tokens[column] }
    }

    /// Runs one step of the head: `batch` has the token behind each row's state, and the row's own
    /// slot.
    pub fn forward(&mut self, decoder: &mut Decoder<B>, batch: &Batch, features: &[Feature]) -> Result<()> {
        self.num_outputs = 0;
        let rows_before = std::mem::take(&mut self.num_rows);
        check::same("states", features.len(), batch.num_rows())?;
        let sources = Sources::of(features);
        sources.check(decoder.num_tapped(), rows_before)?;
        if features.is_empty() {
            return Ok(());
        }
        check::batch(&self.spec, &self.limits, batch, false)?;
        let Lent { backend, embedding, output, tapped, .. } = decoder.lend();
        let tapped = tapped.expect("a decoder is tapped when a head is loaded for it");
        let size = backend.upload(&mut self.inputs, batch);
        if let Some((rope, inv_freq)) = &self.rope {
            backend.rope_angles(&mut self.inputs, 0, inv_freq, rope.magnitude);
        }
        backend.embed(&mut self.acts.embedded, embedding, &self.inputs, self.spec.embed_scale);
        self.gather_states(backend, &sources, tapped, size.rows);
        match self.layout {
            EagleLayout::One => self.run_one(backend, size.rows),
            EagleLayout::Three => self.run_three(backend, size.rows),
        }
        if size.outputs > 0 {
            self.compute_outputs(backend, output, size.outputs);
        }
        (self.num_rows, self.num_outputs) = (batch.num_rows(), batch.outputs.len());
        Ok(backend.check()?)
    }

    /// Copies every row's state to the stream.
    fn gather_states(&mut self, backend: &mut B, sources: &Sources, tapped: &B::Tensor, rows: usize) {
        let acts = &mut self.acts;
        std::mem::swap(&mut acts.state, &mut acts.state_before);
        match &mut acts.fused {
            Some(fused) if !sources.decoder.is_empty() => {
                backend.copy_rows(fused, tapped, &sources.decoder);
                // This computes nothing useful for rows from other sources, which are overwritten
                // below.
                self.fc.forward(backend, &mut acts.state, fused, rows);
            }
            Some(_) => {}
            None => backend.copy_rows(&mut acts.state, tapped, &sources.decoder),
        }
        backend.copy_rows(&mut acts.state, &acts.state_before, &sources.after);
    }

    /// EAGLE-3: the state itself is the stream; attention reads it beside the embedding.
    fn run_three(&mut self, backend: &mut B, rows: usize) {
        let Self { acts, norms, spec, .. } = self;
        for (norm, x, column) in [(&norms.input, &acts.embedded, 0), (&norms.hidden, &acts.state, spec.hidden)] {
            let norm = norm.as_ref().expect("this layout has both norms");
            backend.rms_norm(&mut acts.normed, x, norm, spec.norm_eps, rows);
            backend.copy_columns(&mut acts.both, column, &acts.normed, rows);
        }
        self.layer.forward(backend, &mut acts.state, Some(&acts.both), &self.inputs, rows);
    }

    /// EAGLE-1: the stream is computed from embedding and state.
    fn run_one(&mut self, backend: &mut B, rows: usize) {
        let Self { acts, norms, spec, .. } = self;
        backend.copy_columns(&mut acts.both, 0, &acts.embedded, rows);
        backend.copy_columns(&mut acts.both, spec.hidden, &acts.state, rows);
        self.fc.forward(backend, &mut acts.state, &acts.both, rows);
        if let Some(norm) = &norms.input {
            backend.rms_norm(&mut acts.normed, &acts.state, norm, spec.norm_eps, rows);
        }
        let x = norms.input.as_ref().map(|_| &acts.normed);
        self.layer.forward(backend, &mut acts.state, x, &self.inputs, rows);
    }

    fn compute_outputs(&mut self, backend: &mut B, decoders: Product<'_, B>, rows: usize) {
        let Self { acts, spec, .. } = self;
        backend.gather_outputs(&mut acts.last, &acts.state, &self.inputs);
        let x = match &self.norms.last {
            Some(norm) => {
                backend.rms_norm(&mut acts.last_normed, &acts.last, norm, spec.norm_eps, rows);
                &acts.last_normed
            }
            None => &acts.last,
        };
        match &self.output {
            Some(own) => own.forward(backend, &mut acts.logits, x, rows),
            None => backend.linear(&mut acts.logits, x, decoders.weight, decoders.bias, rows),
        }
        if self.scales_logits && (spec.logit_scale != 1.0 || spec.logit_soft_cap.is_some()) {
            backend.finish_logits(&mut acts.logits, spec.logit_scale, spec.logit_soft_cap, rows);
        }
    }

    /// The last step's logits, `[outputs, vocab_size]`, into `out`; [`Eagle::token`] gives the
    /// token of each column.
    pub fn logits(&mut self, decoder: &mut Decoder<B>, out: &mut Vec<f32>) {
        decoder.backend_mut().download(&self.acts.logits, self.num_outputs, out);
    }

    /// Like the decoder's, for blocks of the head's [`Eagle::group`].
    pub fn copy_blocks(&mut self, decoder: &mut Decoder<B>, pairs: &[(u32, u32)]) {
        decoder.backend_mut().copy_blocks(self.layer.kv(), pairs);
    }
}

/// A head has one group of blocks. A row of a growing tree is a span with its own table.
fn limits(decoders: &DecoderLimits, group: usize, room: EagleRoom) -> DecoderLimits {
    let per_span = decoders.table_entries.div_ceil(decoders.spans.max(1));
    DecoderLimits {
        rows: decoders.rows.max(room.drafts),
        spans: decoders.spans.max(room.drafts),
        outputs: decoders.outputs.max(room.drafts),
        table_entries: decoders.table_entries.max(room.drafts.saturating_mul(per_span)) + room.drafts,
        blocks: vec![decoders.blocks[group].max(room.blocks)],
        kv_format: decoders.kv_format,
    }
}

impl<B: Backend> Acts<B> {
    fn new(room: &mut Room<'_, B>, sizes: &Sizes, hidden: usize, limits: &DecoderLimits) -> Result<Self> {
        use TensorKind::{Activation, Scores, Stream};
        let (rows, outputs) = (limits.rows, limits.outputs);
        let (fused, both) = match sizes.layout {
            EagleLayout::Three => (Some(room.tensor(rows, sizes.fused, Stream)?), Activation),
            EagleLayout::One => (None, Stream),
        };
        Ok(Self {
            fused,
            state: room.tensor(rows, hidden, Stream)?,
            state_before: room.tensor(rows, hidden, Stream)?,
            embedded: room.tensor(rows, hidden, Stream)?,
            normed: room.tensor(rows, hidden, Activation)?,
            both: room.tensor(rows, 2 * hidden, both)?,
            last: room.tensor(outputs, hidden, Stream)?,
            last_normed: room.tensor(outputs, hidden, Activation)?,
            logits: room.tensor(outputs, sizes.vocab, Scores)?,
        })
    }
}
