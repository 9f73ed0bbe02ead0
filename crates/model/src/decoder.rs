//! One decoder for every family: it runs a [`ModelSpec`] on a backend, and does not depend on the
//! family or the device.
//!
//! The residual stream is the spine. Each sub-layer reads it (through a norm, if one stands before
//! it) and computes a branch, which is added to the stream; this addition and the next norm are one
//! operation if both exist.

pub(crate) mod check;
mod stage;
mod taps;

use folio_device::{Backend, Batch, Drawn, Draws, HostMemory, InputLimits, KvFormat, KvShape, Norm, StepSize};

use crate::{
    MemoryUse, ModelSpec, OpenModel, Result,
    activations::Activations,
    attention::{AttentionLayer, KvPlace},
    ffn::FfnLayer,
    linear::{Linear, Source},
    load::{LoadProgress, Loader, Place},
    memory,
    names::Part,
};

pub use stage::Stage;
pub(crate) use taps::Lent;
pub use taps::Tap;
use taps::Taps;

/// The largest step a decoder is sized for, and its KV blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecoderLimits {
    /// Most tokens in a step.
    pub rows: usize,
    /// Most sequences in a step.
    pub spans: usize,
    /// Most rows of logits per step.
    pub outputs: usize,
    /// Most block-table entries of all sequences together, per layer group.
    pub table_entries: usize,
    /// KV blocks of each layer group.
    pub blocks: Vec<usize>,
    pub kv_format: KvFormat,
}

pub struct Decoder<B: Backend> {
    backend: B,
    /// Spec of this stage, with only its layers.
    spec: ModelSpec,
    limits: DecoderLimits,
    /// None in a stage that neither begins with the embedding table nor ends in it.
    embedding: Option<B::Weight>,
    layers: Vec<Layer<B>>,
    /// None in a stage that is not the last.
    final_norm: Option<B::Vector>,
    /// None if the embedding table is the output matrix.
    head: Option<Linear<B>>,
    ropes: Vec<B::Vector>,
    kv: Vec<B::Kv>,
    inputs: B::Inputs,
    acts: Activations<B>,
    /// Output rows of the last step, and the number of them with logits.
    num_outputs: usize,
    num_logits: usize,
    /// States for a drafting head, if they were requested.
    taps: Option<Taps<B>>,
    memory: MemoryUse,
}

struct Layer<B: Backend> {
    attention: AttentionLayer<B>,
    ffn: FfnLayer<B>,
    norms: Norms<B>,
    residual_scale: f32,
}

struct Norms<B: Backend> {
    before_attention: Option<B::Vector>,
    after_attention: Option<B::Vector>,
    before_ffn: Option<B::Vector>,
    after_ffn: Option<B::Vector>,
}

impl<B: Backend> Decoder<B> {
    /// Packs the weights tensor by tensor, freeing the source's pages on the way, and allocates all
    /// memory of a step.
    pub fn load(
        backend: B,
        model: &OpenModel,
        limits: DecoderLimits,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self> {
        Self::load_stage(backend, model, &Stage::whole(&model.spec), limits, progress)
    }

    /// Loads a part of the model; `limits.blocks` are those of the layer groups of
    /// [`Stage::spec`].
    pub fn load_stage(
        mut backend: B,
        model: &OpenModel,
        stage: &Stage,
        limits: DecoderLimits,
        progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Self> {
        let spec = stage.spec(&model.spec);
        check::limits(&spec, &limits)?;
        let mut loader = Loader::new(model, !backend.reads_matrices());
        let vocabulary = |backend: &mut B, part| -> Result<Linear<B>> {
            Linear::new(backend, &loader.matrix(part, Place::OUTSIDE, spec.vocab_size, spec.hidden)?, None)
        };
        let embedding = match stage.embeds || (stage.ends && spec.tied_head) {
            true => Some(vocabulary(&mut backend, Part::Embedding)?),
            false => None,
        };
        let head = match stage.ends && !spec.tied_head {
            true => Some(vocabulary(&mut backend, Part::Head)?),
            false => None,
        };
        loader.settle(progress);
        let layers = load_layers(&mut backend, &mut loader, &spec, stage.layers.start, progress)?;
        let final_norm = match stage.ends {
            true => Some(backend.vector(&loader.norm(Part::FinalNorm, Place::OUTSIDE, spec.hidden)?)?),
            false => None,
        };
        loader.settle(progress);
        model.weights.check()?;
        backend.end_load();
        let ropes = spec.ropes.iter().map(|rope| Ok(backend.vector(&rope.inv_freq)?)).collect::<Result<_>>()?;
        let kv = kv_shapes(&spec, &limits).map(|shape| Ok(backend.kv(shape)?)).collect::<Result<Vec<_>>>()?;
        let inputs = backend.inputs(InputLimits {
            rows: limits.rows,
            spans: limits.spans,
            outputs: limits.outputs,
            table_entries: limits.table_entries,
            groups: kv.len(),
            ropes: spec.ropes.len(),
            rope_pairs: spec.ropes.iter().map(|rope| rope.inv_freq.len()).max().unwrap_or(0),
        })?;
        let acts = Activations::new(&mut backend, &spec, &limits)?;
        let in_layers: u64 = layers.iter().map(|l| l.attention.bytes(&backend) + l.ffn.bytes(&backend)).sum();
        let outside: u64 = embedding.iter().chain(&head).map(|linear| linear.bytes(&backend)).sum();
        let memory = MemoryUse {
            weights: in_layers + outside,
            kv: memory::kv_bytes(&spec, &limits),
            activations: memory::activation_bytes(&spec, &limits, |kind| backend.value_bytes(kind)),
        };
        let embedding = embedding.map(Linear::into_weight);
        let (num_outputs, num_logits) = (0, 0);
        Ok(Self {
            backend,
            spec,
            limits,
            embedding,
            layers,
            final_norm,
            head,
            ropes,
            kv,
            inputs,
            acts,
            num_outputs,
            num_logits,
            taps: None,
            memory,
        })
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    pub fn limits(&self) -> &DecoderLimits {
        &self.limits
    }

    pub fn memory(&self) -> MemoryUse {
        self.memory
    }

    pub fn backend(&self) -> &B {
        &self.backend
    }

    pub fn backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Runs one step: keys and values of all rows are stored, logits of `batch.outputs` computed.
    pub fn forward(&mut self, batch: &Batch) -> Result<()> {
        self.forward_with(batch, batch.outputs.len())
    }

    /// Runs one step, with logits only for the first `num_logits` of `batch.outputs`; only
    /// [`Decoder::hidden`] is needed for the others.
    pub fn forward_with(&mut self, batch: &Batch, num_logits: usize) -> Result<()> {
        self.step(batch, None, num_logits)
    }

    /// Runs one step of a stage in the middle: it continues from the previous stage's
    /// [`Decoder::stream`], one row per token. Token ids are ignored.
    pub fn forward_from(&mut self, batch: &Batch, stream: &[f32]) -> Result<()> {
        check::same("a stream of hidden states", stream.len(), batch.num_rows() * self.spec.hidden)?;
        self.step(batch, Some(stream), batch.outputs.len())
    }

    fn step(&mut self, batch: &Batch, stream: Option<&[f32]>, num_logits: usize) -> Result<()> {
        (self.num_outputs, self.num_logits) = (0, 0);
        self.note_tapped(0);
        if batch.num_rows() == 0 {
            return Ok(());
        }
        check::batch(&self.spec, &self.limits, batch, self.backend.draws_tokens())?;
        let outputs = batch.outputs.len();
        let size = self.backend.upload(&mut self.inputs, batch);
        // If the device has padded the step, padding rows get logits too.
        let logits = if num_logits >= outputs { size.outputs } else { num_logits };
        match stream {
            Some(stream) => {
                self.backend.upload_rows(&mut self.acts.residual, stream);
                self.run(size, logits, false);
            }
            None => {
                // Copies of states may go through the host, which cannot be recorded.
                let records = self.backend.records_copies() || !self.taps.as_ref().is_some_and(Taps::copies);
                if !records || self.backend.begin(&self.inputs, logits) {
                    self.run(size, logits, true);
                    if records {
                        self.backend.end(&self.inputs);
                    }
                }
            }
        }
        (self.num_outputs, self.num_logits) = (outputs, num_logits.min(outputs));
        self.note_tapped(batch.num_rows());
        Ok(self.backend.check()?)
    }

    /// The operations of an uploaded step, from token ids or from the contents of the residual
    /// stream.
    fn run(&mut self, size: StepSize, num_logits: usize, embed: bool) {
        let Self { backend, spec, embedding, layers, ropes, kv, inputs, acts, taps, .. } = self;
        let rows = size.rows;
        for (number, rope) in spec.ropes.iter().enumerate() {
            backend.rope_angles(inputs, number, &ropes[number], rope.magnitude);
        }
        if embed {
            let table = embedding.as_ref().expect("a stage without the embedding table is given hidden states");
            backend.embed(&mut acts.residual, table, inputs, spec.embed_scale);
        }
        // Products of few rows normalize their input and add their output themselves.
        let (fused, eps) = (rows <= backend.fused_rows(), spec.norm_eps);
        if let Some(norm) = layers.first().and_then(|layer| layer.norms.before_attention.as_ref())
            && !fused
        {
            backend.rms_norm(&mut acts.normed, &acts.residual, norm, eps, rows);
        }
        for (number, layer) in layers.iter().enumerate() {
            if let Some(taps) = taps {
                taps.before(backend, number, &acts.residual, rows);
            }
            let (norms, scale) = (&layer.norms, layer.residual_scale);
            let fused_ffn = fused && layer.ffn.is_dense();
            let join = Join { scale, eps, rows };

            let added = (fused && norms.after_attention.is_none()).then_some(scale);
            let before = source(norms.before_attention.as_ref(), eps, fused);
            layer.attention.forward(backend, acts, kv, inputs, before, added, rows);
            let next = norms.before_ffn.as_ref().filter(|_| !fused_ffn);
            join.run(backend, acts, added.is_some(), norms.after_attention.as_ref(), next);

            let added = (fused_ffn && norms.after_ffn.is_none()).then_some(scale);
            let before = source(norms.before_ffn.as_ref(), eps, fused_ffn);
            layer.ffn.forward(backend, acts, before, added, rows);
            let next = layers.get(number + 1).and_then(|layer| layer.norms.before_attention.as_ref());
            join.run(backend, acts, added.is_some(), norms.after_ffn.as_ref(), next.filter(|_| !fused));
        }
        if let (Some(taps), Some(norm)) = (taps, &self.final_norm) {
            taps.behind(backend, &acts.residual, norm, eps, rows);
        }
        if size.outputs > 0 && self.final_norm.is_some() {
            self.compute_outputs(size.outputs, num_logits);
        }
    }

    /// Only output rows pay for the last norm and the output matrix.
    fn compute_outputs(&mut self, outputs: usize, num_logits: usize) {
        let Self { backend, spec, acts, inputs, .. } = self;
        backend.gather_outputs(&mut acts.picked, &acts.residual, inputs);
        let norm = self.final_norm.as_ref().expect("outputs are computed by the last stage");
        backend.rms_norm(&mut acts.picked_normed, &acts.picked, norm, spec.norm_eps, outputs);
        let rows = num_logits;
        if rows == 0 {
            return;
        }
        match (&self.head, &self.embedding) {
            (Some(head), _) => head.forward(backend, &mut acts.logits, &acts.picked_normed, rows),
            (None, Some(table)) => backend.linear(&mut acts.logits, &acts.picked_normed, table, None, rows),
            (None, None) => unreachable!("the last stage has a head or the embedding table"),
        }
        if spec.logit_scale != 1.0 || spec.logit_soft_cap.is_some() {
            backend.finish_logits(&mut acts.logits, spec.logit_scale, spec.logit_soft_cap, rows);
        }
    }

    /// The last step's logits, `[outputs, vocab]`, into `out`.
    pub fn logits(&mut self, out: &mut Vec<f32>) {
        self.backend.download(&self.acts.logits, self.num_logits, out);
    }

    /// Whether [`Decoder::draw`] is supported.
    pub fn draws_tokens(&self) -> bool {
        self.backend.draws_tokens()
    }

    /// Starts to sample tokens from the last step's logits on the device, which overwrites them.
    /// Does not wait.
    pub fn draw(&mut self, draws: &Draws) {
        self.backend.draw(&mut self.acts.logits, draws);
    }

    /// Whether [`Decoder::drawn`] would return without waiting.
    pub fn is_drawn(&mut self) -> bool {
        self.backend.is_drawn()
    }

    /// Waits for the oldest [`Decoder::draw`] that was not collected yet, and returns its results.
    pub fn drawn(&mut self, out: &mut Vec<Drawn>) -> Result<()> {
        Ok(self.backend.drawn(out)?)
    }

    /// The inputs of the output matrix, the states behind the last norm, of all output rows:
    /// `[outputs, hidden]`.
    pub fn hidden(&mut self, out: &mut Vec<f32>) {
        self.backend.download(&self.acts.picked_normed, self.num_outputs, out);
    }

    /// The residual stream behind this stage's last layer, of the last step's first `rows` rows:
    /// `[rows, hidden]`.
    pub fn stream(&mut self, rows: usize, out: &mut Vec<f32>) {
        self.backend.download(&self.acts.residual, rows, out);
    }

    /// Copies whole KV blocks of a layer group: pairs of (from, to).
    pub fn copy_blocks(&mut self, group: usize, pairs: &[(u32, u32)]) {
        self.backend.copy_blocks(&mut self.kv[group], pairs);
    }

    /// Copies keys and values of single tokens of a layer group, in order: pairs of slots (from,
    /// to).
    pub fn move_tokens(&mut self, group: usize, pairs: &[(u32, u32)]) {
        self.backend.move_tokens(&mut self.kv[group], pairs);
    }

    /// Bytes of one block of a layer group outside the device.
    pub fn block_bytes(&self, group: usize) -> usize {
        let shape = kv_shapes(&self.spec, &self.limits).nth(group).expect("a layer group of this model");
        shape.block_bytes() as usize
    }

    /// One KV block of a layer group, as [`Decoder::block_bytes`] opaque bytes that
    /// [`Decoder::load_block`] takes back.
    pub fn save_block(&mut self, group: usize, block: u32, out: &mut [u8]) {
        self.backend.save_block(&self.kv[group], block, out);
    }

    /// Fills a KV block with bytes from [`Decoder::save_block`], of this block or another, from
    /// this process or one with the same [`Decoder::fingerprint`].
    pub fn load_block(&mut self, group: usize, block: u32, bytes: &[u8]) {
        self.backend.load_block(&mut self.kv[group], block, bytes);
    }

    /// Like [`Decoder::save_block`]; an unfinished save returns its memory through
    /// [`Decoder::moved`].
    pub fn start_save(&mut self, group: usize, block: u32, memory: Box<dyn HostMemory>) -> Option<Box<dyn HostMemory>> {
        self.backend.start_save(&self.kv[group], block, memory)
    }

    /// Like [`Decoder::load_block`]; an unfinished load ends in [`Decoder::moved`].
    pub fn start_load(&mut self, group: usize, block: u32, memory: Box<dyn HostMemory>) -> Option<Box<dyn HostMemory>> {
        self.backend.start_load(&mut self.kv[group], block, memory)
    }

    /// Waits for the oldest unfinished save or load.
    pub fn moved(&mut self) -> Box<dyn HostMemory> {
        self.backend.moved()
    }
}

/// Input of a sub-layer behind this norm; `fused`: its product normalizes.
fn source<B: Backend>(norm: Option<&B::Vector>, eps: f32, fused: bool) -> Source<'_, B> {
    match norm {
        None => Source::Stream,
        Some(weight) if fused => Source::Norm(Norm { weight, eps }),
        Some(_) => Source::Normed,
    }
}

/// Addition of a branch to the residual stream.
struct Join {
    scale: f32,
    eps: f32,
    rows: usize,
}

impl Join {
    /// `added`: the branch was added already.
    fn run<B: Backend>(
        &self,
        backend: &mut B,
        acts: &mut Activations<B>,
        added: bool,
        after: Option<&B::Vector>,
        next: Option<&B::Vector>,
    ) {
        let Join { scale, eps, rows } = *self;
        if added {
            if let Some(norm) = next {
                backend.rms_norm(&mut acts.normed, &acts.residual, norm, eps, rows);
            }
            return;
        }
        let branch = match (after, &mut acts.post) {
            (Some(norm), Some(post)) => {
                backend.rms_norm(post, &acts.branch, norm, eps, rows);
                &*post
            }
            _ => &acts.branch,
        };
        match next {
            Some(norm) => {
                backend.add_rms_norm(&mut acts.normed, &mut acts.residual, branch, scale, norm, eps, rows);
            }
            None => backend.add(&mut acts.residual, branch, scale, rows),
        }
    }
}

fn load_layers<B: Backend>(
    backend: &mut B,
    loader: &mut Loader<'_>,
    spec: &ModelSpec,
    first: usize,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Vec<Layer<B>>> {
    let groups = spec.kv_groups();
    let kv_place = |layer: usize| {
        let found = groups.iter().enumerate().find_map(|(group, members)| {
            Some(KvPlace { group, slot: members.layers.iter().position(|member| *member == layer)? })
        });
        found.expect("every layer is in exactly one group")
    };
    let mut layers = Vec::with_capacity(spec.layers.len());
    for (number, layer) in spec.layers.iter().enumerate() {
        let place = Place::of(first + number, layer);
        let norm = |backend: &mut B, wanted: bool, part| -> Result<Option<B::Vector>> {
            Ok(if wanted { Some(backend.vector(&loader.norm(part, place, spec.hidden)?)?) } else { None })
        };
        let norms = Norms {
            before_attention: norm(backend, layer.norms.before_attention, Part::NormBeforeAttention)?,
            after_attention: norm(backend, layer.norms.after_attention, Part::NormAfterAttention)?,
            before_ffn: norm(backend, layer.norms.before_ffn, Part::NormBeforeFfn)?,
            after_ffn: norm(backend, layer.norms.after_ffn, Part::NormAfterFfn)?,
        };
        let kv = kv_place(number);
        let attention = AttentionLayer::load(backend, loader, place, layer, spec.hidden, spec.norm_eps, kv)?;
        loader.settle(progress);
        let ffn = FfnLayer::load(backend, loader, place, layer, spec.hidden)?;
        loader.settle(progress);
        layers.push(Layer { attention, ffn, norms, residual_scale: layer.residual_scale });
    }
    Ok(layers)
}

/// The paged storage of each layer group.
pub(crate) fn kv_shapes(spec: &ModelSpec, limits: &DecoderLimits) -> impl Iterator<Item = KvShape> {
    let format = limits.kv_format;
    let groups = spec.kv_groups().into_iter().zip(limits.blocks.clone());
    groups.map(move |(group, blocks)| group.shape(blocks, format))
}

#[cfg(test)]
mod tests;
