//! The operations a forward pass is made of, and the memory they work on.
//!
//! A backend owns its memory: tensors, weights and KV storage are opaque handles made once at start. The operations
//! of a step allocate nothing, return nothing to the host and never branch on a tensor's contents, so that a device
//! may record them once and replay them ([`Backend::begin`]); only `upload`, `upload_rows`, `download`, `draw`, `drawn`,
//! `copy_rows`, `save_block` and `load_block` cross the border.
//! Activations are `[rows, width]`, one row a token, whatever request it belongs to.
//!
//! On the CPU every operation is row-independent: a row's result depends on that row's inputs alone, bit for bit, never
//! on how many rows run beside it or on the number of threads. Reductions run in one fixed order. A device may promise
//! less for matrix products unless it is asked for more; [`Backend::numerics`] says which.

use folio_formats::Matrix;

use crate::{Batch, Drawn, Draws, HostMemory, KvShape, Pulse, Result};

/// A device that can run a decoder.
pub trait Backend: Send + 'static {
    /// f32-valued activations `[rows, cols]`; the device may hold them in a narrower type, see [`TensorKind`].
    type Tensor: Send;
    /// A short constant vector: norm weights, biases, sinks, inverse frequencies.
    type Vector: Send;
    /// `[outputs, inputs]` of one linear layer (or an embedding table), in the layout its kernels stream.
    type Weight: Send;
    /// The experts of one layer.
    type Experts: Send;
    /// Paged keys and values of one layer group.
    type Kv: Send;
    /// What one step is about: ids, positions, spans, block tables; and the scratch that follows from its size.
    type Inputs: Send;

    // ---- made once, at start ----

    fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<Self::Tensor>;
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector>;
    /// Copies and repacks; the matrix's bytes are not needed afterwards.
    fn weight(&mut self, matrix: &Matrix<'_>) -> Result<Self::Weight>;
    fn experts(&mut self, source: ExpertsSource<'_>) -> Result<Self::Experts>;
    /// Whether the values of matrices are looked at; where only their sizes are, nobody need compute them.
    fn reads_matrices(&self) -> bool {
        true
    }
    /// A model's weights are all there; what is made from now on belongs to another.
    fn end_load(&mut self) {}
    fn kv(&mut self, shape: KvShape) -> Result<Self::Kv>;
    fn inputs(&mut self, limits: InputLimits) -> Result<Self::Inputs>;

    /// What the bits of a result depend on besides its inputs: the backend and its kernels, in words. Two backends of
    /// one name compute the same bits.
    fn numerics(&self) -> String;

    /// Bytes of one value of a tensor.
    fn value_bytes(&self, _kind: TensorKind) -> usize {
        size_of::<f32>()
    }

    /// Bytes a weight occupies on the device, padding included.
    fn weight_bytes(&self, weight: &Self::Weight) -> u64;
    /// Bytes a layer's experts occupy on the device, padding and biases included.
    fn experts_bytes(&self, experts: &Self::Experts) -> u64;

    /// What beats while operations go on. None where nothing is heard of a step before its end.
    fn pulse(&self) -> Option<Pulse> {
        None
    }

    // ---- one step ----

    /// Takes over the step's ids, positions, spans and tables.
    ///
    /// The operations that follow are asked for the size returned, which is at least the batch's own: a device may pad
    /// a step of short spans in which every row has an output up to a size that it has recorded. The rows added lie behind
    /// the others, write no keys and mean nothing.
    fn upload(&mut self, inputs: &mut Self::Inputs, batch: &Batch) -> StepSize;

    /// Before the operations of an uploaded step, the first `num_logits` of whose outputs get logits. False: all of them
    /// were done by replaying a recording, and are to be left out, [`Backend::end`] included.
    fn begin(&mut self, _inputs: &Self::Inputs, _num_logits: usize) -> bool {
        true
    }

    /// Behind the operations of a step that [`Backend::begin`] asked for.
    fn end(&mut self, _inputs: &Self::Inputs) {}

    /// Whether [`Backend::copy_columns`] may be part of a recorded step.
    fn records_copies(&self) -> bool {
        false
    }

    /// Steps from now on ask for other operations than those before: what was recorded is forgotten.
    fn forget_steps(&mut self) {}

    /// What went wrong on the device so far, where operations could not say it; asked at the end of each step. It does
    /// not wait for the device: what the device is still to find is said later.
    fn check(&mut self) -> Result<()> {
        Ok(())
    }

    /// Cosines and sines of this step's positions for rope number `rope`: angle = position * inv_freq[i] in f32, both
    /// multiplied by `magnitude`.
    fn rope_angles(&mut self, inputs: &mut Self::Inputs, rope: usize, inv_freq: &Self::Vector, magnitude: f32);

    /// `out[r] = table[ids[r]] * scale`.
    fn embed(&mut self, out: &mut Self::Tensor, table: &Self::Weight, inputs: &Self::Inputs, scale: f32);

    /// `out = x / rms(x) * weight`, row by row.
    fn rms_norm(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, weight: &Self::Vector, eps: f32, rows: usize);

    /// `residual += x * scale`.
    fn add(&mut self, residual: &mut Self::Tensor, x: &Self::Tensor, scale: f32, rows: usize);

    /// `residual += x * scale; out = rms_norm(residual)`.
    fn add_rms_norm(
        &mut self,
        out: &mut Self::Tensor,
        residual: &mut Self::Tensor,
        x: &Self::Tensor,
        scale: f32,
        weight: &Self::Vector,
        eps: f32,
        rows: usize,
    );

    /// `out = x * weight^T (+ bias)`.
    fn linear(
        &mut self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        rows: usize,
    );

    /// Up to so many rows [`Backend::norm_linear`], [`Backend::norm_linear_gated`] and [`Backend::linear_add`] are worth
    /// asking for: the device does each at once. Beyond, and where it is none, their parts are asked for one by one.
    /// None where a row's bits may not depend on how many there are.
    fn fused_rows(&self) -> usize {
        0
    }

    /// `out = rms_norm(x) * weight^T (+ bias)`, as precise as its parts. `normed` has room for the normed rows, and means
    /// nothing afterwards.
    fn norm_linear(
        &mut self,
        out: &mut Self::Tensor,
        normed: &mut Self::Tensor,
        x: &Self::Tensor,
        norm: Norm<'_, Self>,
        product: Product<'_, Self>,
        rows: usize,
    ) where
        Self: Sized,
    {
        self.rms_norm(normed, x, norm.weight, norm.eps, rows);
        self.linear(out, normed, product.weight, product.bias, rows);
    }

    /// The same with outputs `[gate | up]` (room for which is `gate_up`), of which `act(gate) * up` becomes `out`.
    #[expect(clippy::too_many_arguments)]
    fn norm_linear_gated(
        &mut self,
        out: &mut Self::Tensor,
        gate_up: &mut Self::Tensor,
        normed: &mut Self::Tensor,
        x: &Self::Tensor,
        norm: Norm<'_, Self>,
        product: Product<'_, Self>,
        activation: Activation,
        rows: usize,
    ) where
        Self: Sized,
    {
        self.norm_linear(gate_up, normed, x, norm, product, rows);
        self.gate(out, gate_up, activation, rows);
    }

    /// `x * weight^T (+ bias)`, then [`Backend::gate`] of that; `gate_up` has room for the product.
    fn linear_gated(
        &mut self,
        out: &mut Self::Tensor,
        gate_up: &mut Self::Tensor,
        x: &Self::Tensor,
        product: Product<'_, Self>,
        activation: Activation,
        rows: usize,
    ) where
        Self: Sized,
    {
        self.linear(gate_up, x, product.weight, product.bias, rows);
        self.gate(out, gate_up, activation, rows);
    }

    /// `residual += (x * weight^T (+ bias)) * scale`, as precise as its parts; `branch` has room for the product.
    fn linear_add(
        &mut self,
        residual: &mut Self::Tensor,
        branch: &mut Self::Tensor,
        x: &Self::Tensor,
        product: Product<'_, Self>,
        scale: f32,
        rows: usize,
    ) where
        Self: Sized,
    {
        self.linear(branch, x, product.weight, product.bias, rows);
        self.add(residual, branch, scale, rows);
    }

    /// The weight that the product behind the next [`Backend::attention`] reads, so that a device may fetch it meanwhile.
    fn fetch_ahead(&mut self, _: &Self::Weight) {}

    /// On rows `[q heads | k heads | v heads]`: norms q and k where asked, rotates them, and writes k and v to the
    /// step's slots of layer `layer` of the group. q stays in `qkv` for [`Backend::attention`].
    fn prepare_qkv(
        &mut self,
        qkv: &mut Self::Tensor,
        kv: &mut Self::Kv,
        layer: usize,
        op: &PrepareQkv<'_, Self>,
        inputs: &Self::Inputs,
    ) where
        Self: Sized;

    /// Causal attention of the step's q over its spans' blocks, by online softmax: `out` is `[rows, heads * head_dim]`.
    /// Rows of a [`tree`](crate::tree) see their own path, and get the bits that they would get in a chain.
    fn attention(
        &mut self,
        out: &mut Self::Tensor,
        qkv: &Self::Tensor,
        kv: &Self::Kv,
        layer: usize,
        op: &Attention<'_, Self>,
        inputs: &Self::Inputs,
    ) where
        Self: Sized;

    /// Rows `[gate | up]` to `act(gate) * up`, half as wide.
    fn gate(&mut self, out: &mut Self::Tensor, gate_up: &Self::Tensor, activation: Activation, rows: usize);

    /// Chooses experts by the router's logits `[rows, experts]` and adds their outputs, weighted, in expert order:
    /// `out = sum_e w_e * down_e(act(gate_e(x)) * up_e(x))`. Rows are computed grouped by expert.
    fn experts_forward(
        &mut self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        router_logits: &Self::Tensor,
        experts: &Self::Experts,
        op: &Routing<'_, Self>,
        rows: usize,
    ) where
        Self: Sized;

    /// `out[r] += x[r] * sigmoid(gate[r])`: a shared expert behind its gate; `gate` is `[rows, 1]`.
    fn add_gated(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, gate: &Self::Tensor, rows: usize);

    /// The rows whose logits were asked for: `out[i] = x[inputs.outputs[i]]`.
    fn gather_outputs(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, inputs: &Self::Inputs);

    /// `logits = cap * tanh(logits * scale / cap)`, or `logits * scale` without a cap.
    fn finish_logits(&mut self, logits: &mut Self::Tensor, scale: f32, soft_cap: Option<f32>, rows: usize);

    /// `out[r][column..column + width of x] = x[r]`, the other columns left alone.
    ///
    /// Where a device does not do it by itself it goes by way of the host, and is no part of a recorded step
    /// ([`Backend::records_copies`]).
    fn copy_columns(&mut self, out: &mut Self::Tensor, column: usize, x: &Self::Tensor, rows: usize) {
        if rows == 0 {
            return;
        }
        let (mut target, mut values) = (Vec::new(), Vec::new());
        self.download(out, rows, &mut target);
        self.download(x, rows, &mut values);
        let (all, width) = (target.len() / rows, values.len() / rows);
        for (out, x) in target.chunks_exact_mut(all).zip(values.chunks_exact(width)) {
            out[column..column + width].copy_from_slice(x);
        }
        self.upload_rows(out, &target);
    }

    /// Copies rows that the host names between steps: pairs of (from, to), the second a row of `out`, each of which is
    /// named once. Never part of a recorded step.
    fn copy_rows(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, pairs: &[(u32, u32)]) {
        let (Some(from), Some(to)) = (pairs.iter().map(|pair| pair.0).max(), pairs.iter().map(|pair| pair.1).max())
        else {
            return;
        };
        let (mut target, mut values) = (Vec::new(), Vec::new());
        self.download(out, to as usize + 1, &mut target);
        self.download(x, from as usize + 1, &mut values);
        let width = values.len() / (from as usize + 1);
        for &(from, to) in pairs {
            target[to as usize * width..][..width].copy_from_slice(&values[from as usize * width..][..width]);
        }
        self.upload_rows(out, &target);
    }

    /// Copies whole blocks, all layers of the group: pairs of (from, to).
    fn copy_blocks(&mut self, kv: &mut Self::Kv, pairs: &[(u32, u32)]);

    /// Copies keys and values of single tokens, all layers of the group: pairs of slots (from, to), one after the other,
    /// so that a pair reads what those before it wrote.
    fn move_tokens(&mut self, kv: &mut Self::Kv, pairs: &[(u32, u32)]);

    // ---- to the host and back ----

    /// The other way: `values` become the first rows.
    fn upload_rows(&mut self, tensor: &mut Self::Tensor, values: &[f32]);

    /// The first `rows` rows, packed, into `out`.
    fn download(&mut self, tensor: &Self::Tensor, rows: usize, out: &mut Vec<f32>);

    /// Whether [`Backend::draw`] and [`Backend::drawn`] may be asked, and ids of [`DRAWN_TOKEN`](crate::DRAWN_TOKEN) be
    /// in a batch.
    fn draws_tokens(&self) -> bool {
        false
    }

    /// Begins to turn rows of the step's logits into tokens, as many as there are outputs at most, perhaps none. The
    /// logits are used up. Does not wait. At most two may be under way.
    fn draw(&mut self, _logits: &mut Self::Tensor, _draws: &Draws) {
        panic!("this device draws no tokens");
    }

    /// Whether [`Backend::drawn`] would not wait.
    fn is_drawn(&mut self) -> bool {
        true
    }

    /// Waits for the oldest [`Backend::draw`] that was not told of yet, and tells what it gave, one entry a draw.
    fn drawn(&mut self, _out: &mut Vec<Drawn>) -> Result<()> {
        panic!("this device draws no tokens");
    }

    // ---- blocks to and from the host, between steps ----

    /// Copies one block, all layers of the group, to the host: keys, then values, [`KvShape::block_bytes`] in all.
    ///
    /// The bytes are opaque: the same backend with storage of the same layers, heads and format gives them back bit
    /// for bit, in any block; nothing else may read them. The copy waits for what was asked before it and is done when
    /// it returns, so it is never part of a recorded step.
    fn save_block(&mut self, kv: &Self::Kv, block: u32, out: &mut [u8]);

    /// Fills one block, all layers of the group, with what [`Backend::save_block`] gave. Operations asked for
    /// afterwards see it; it is never part of a recorded step.
    fn load_block(&mut self, kv: &mut Self::Kv, block: u32, bytes: &[u8]);

    /// As [`Backend::save_block`], but perhaps not done when it returns: then it gives nothing, and [`Backend::moved`] gives the
    /// memory back. Operations asked for afterwards do not change what is saved.
    fn start_save(
        &mut self,
        kv: &Self::Kv,
        block: u32,
        mut memory: Box<dyn HostMemory>,
    ) -> Option<Box<dyn HostMemory>> {
        self.save_block(kv, block, &mut memory);
        Some(memory)
    }

    /// As [`Backend::load_block`], in the same way.
    fn start_load(
        &mut self,
        kv: &mut Self::Kv,
        block: u32,
        memory: Box<dyn HostMemory>,
    ) -> Option<Box<dyn HostMemory>> {
        self.load_block(kv, block, &memory);
        Some(memory)
    }

    /// Waits for the oldest copy that was started and not told of yet, and gives its memory back. A step that was asked for
    /// behind it and has been told of is never waited for.
    fn moved(&mut self) -> Box<dyn HostMemory> {
        panic!("this device moves blocks at once");
    }
}

/// The largest step that `Inputs` must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputLimits {
    pub rows: usize,
    /// Each row of a [`tree`](crate::tree) counts as a span of its own.
    pub spans: usize,
    /// Rows that are gathered, or whose logits are computed.
    pub outputs: usize,
    /// Block-table entries of all spans together, per group; a tree's count once a row.
    pub table_entries: usize,
    pub groups: usize,
    pub ropes: usize,
    /// Width of the widest rope, in pairs.
    pub rope_pairs: usize,
}

/// What a tensor is for: devices that hold activations in a narrower type hold some of them in f32 all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// The residual stream, and rows picked from it.
    Stream,
    /// What matrix products read and give.
    Activation,
    /// Logits, of tokens and of routers.
    Scores,
}

/// How many rows the operations of a step are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    pub rows: usize,
    pub outputs: usize,
}

impl StepSize {
    /// The batch's own size, padded by nothing.
    pub fn of(batch: &Batch) -> Self {
        Self { rows: batch.num_rows(), outputs: batch.outputs.len() }
    }
}

/// A norm that stands before a product.
pub struct Norm<'a, B: Backend> {
    pub weight: &'a B::Vector,
    pub eps: f32,
}

/// What a product multiplies with, and what it adds.
pub struct Product<'a, B: Backend> {
    pub weight: &'a B::Weight,
    pub bias: Option<&'a B::Vector>,
}

/// Which values a q or k norm runs over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormSpan {
    /// Each head by itself; one weight of `head_dim` shared by all heads.
    Head,
    /// All heads of the row together; a weight as wide as the projection.
    Row,
}

pub struct PrepareQkv<'a, B: Backend> {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Layer group whose slots are written.
    pub group: usize,
    /// Rope number, or none for layers without positions. Rotates the first `2 * inv_freq.len()` values of each head,
    /// value `i` paired with value `i + inv_freq.len()`.
    pub rope: Option<usize>,
    pub q_norm: Option<&'a B::Vector>,
    pub k_norm: Option<&'a B::Vector>,
    pub norm_span: NormSpan,
    pub eps: f32,
}

pub struct Attention<'a, B: Backend> {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub group: usize,
    /// Scores are multiplied by this before cap and softmax.
    pub scale: f32,
    /// A row at position p sees positions p-window+1 ..= p.
    pub window: Option<usize>,
    /// Scores become `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// One logit a head that takes part in the softmax and adds nothing.
    pub sinks: Option<&'a B::Vector>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    Silu,
    Gelu,
    GeluTanh,
    /// gpt-oss: gate clamped above, up clamped both ways at `limit`; `(up + 1) * gate * sigmoid(alpha * gate)`.
    SwigluClamped {
        alpha: f32,
        limit: f32,
    },
}

/// How router logits become expert weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterScore {
    /// Softmax over all experts, then the best k.
    Softmax,
    /// The best k logits, then softmax over those.
    SoftmaxOfBest,
    /// Sigmoid of each logit.
    Sigmoid,
}

pub struct Routing<'a, B: Backend> {
    pub score: RouterScore,
    pub top_k: usize,
    /// Divide the chosen weights by their sum.
    pub normalize: bool,
    /// Multiply the chosen weights.
    pub scale: f32,
    /// Added to the scores for the choice only, never to the weight.
    pub choice_bias: Option<&'a B::Vector>,
    /// Experts lie in this many groups, of which the best `groups_kept` (by the sum of their two best scores) compete.
    pub groups: usize,
    pub groups_kept: usize,
    pub activation: Activation,
}

/// All experts of one layer, as matrices; gate rows lie above up rows.
pub struct ExpertsSource<'a> {
    pub gate_up: Vec<Matrix<'a>>,
    pub down: Vec<Matrix<'a>>,
    /// `[experts][2 * inter]` and `[experts][hidden]`.
    pub gate_up_bias: Option<Vec<Vec<f32>>>,
    pub down_bias: Option<Vec<Vec<f32>>>,
}
