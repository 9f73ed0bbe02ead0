//! A backend that writes down what is asked of another: the name of each operation, its numbers, and the shape and
//! address of every handle it touches.
//!
//! A device may record a step once and replay it only if two steps of the same size ask for exactly the same
//! things of exactly the same memory. That is a property of the callers, and the log makes it a test: two equal logs
//! are two replayable steps. A handle's address is that of the inner backend's handle, so one that was rebuilt or
//! moved between steps shows. What changes from step to step without changing the work (token ids, positions, block
//! numbers) goes through `upload`, `copy_blocks`, `move_tokens`, `save_block` and `load_block` and is
//! not logged.

use std::{
    fmt::{Debug, Write},
    sync::{Arc, Mutex, PoisonError},
};

use folio_formats::Matrix;

use crate::{
    Activation, Attention, Backend, Batch, Drawn, Draws, ExpertsSource, InputLimits, KvShape, Norm, PrepareQkv,
    Product, Result, Routing, StepSize, TensorKind,
};

/// One operation as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordingOp {
    pub name: &'static str,
    /// Numbers by name: `rows=5 eps=1e-6`.
    pub arguments: String,
    /// In the order of the operation's parameters.
    pub handles: Vec<HandleId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandleId {
    pub address: usize,
    pub shape: Vec<usize>,
}

/// The operations so far. Clones share one list, so that a test keeps one after the backend has moved into a decoder.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<RecordingOp>>>);

impl Log {
    /// The operations since the last call.
    pub fn take(&self) -> Vec<RecordingOp> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, op: RecordingOp) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(op);
    }
}

/// Passes every operation on to `inner` and logs those of a step. What is made once, at start, is not logged.
#[derive(Debug)]
pub struct Recording<B> {
    inner: B,
    log: Log,
}

/// A handle of the inner backend with the shape it was made with.
#[derive(Debug)]
pub struct Recorded<T> {
    inner: T,
    shape: Vec<usize>,
}

impl<T> Recorded<T> {
    fn new(inner: T, shape: &[usize]) -> Self {
        Self { inner, shape: shape.to_vec() }
    }

    fn id(&self) -> HandleId {
        HandleId { address: std::ptr::from_ref(&self.inner).addr(), shape: self.shape.clone() }
    }
}

impl<B: Backend> Recording<B> {
    pub fn new(inner: B) -> Self {
        Self { inner, log: Log::default() }
    }

    pub fn log(&self) -> Log {
        self.log.clone()
    }

    /// The operations since the last call.
    pub fn take_log(&self) -> Vec<RecordingOp> {
        self.log.take()
    }

    fn note<const N: usize>(&self, name: &'static str, handles: [HandleId; N], arguments: &[(&str, &dyn Debug)]) {
        let mut text = String::new();
        for (name, value) in arguments {
            let gap = if text.is_empty() { "" } else { " " };
            let _ = write!(text, "{gap}{name}={value:?}");
        }
        self.log.push(RecordingOp { name, arguments: text, handles: handles.to_vec() });
    }
}

fn optional<T>(handle: Option<&Recorded<T>>) -> HandleId {
    handle.map_or(HandleId { address: 0, shape: Vec::new() }, Recorded::id)
}

fn inner_norm<'a, B: Backend>(norm: &Norm<'a, Recording<B>>) -> Norm<'a, B> {
    Norm { weight: &norm.weight.inner, eps: norm.eps }
}

fn inner_product<'a, B: Backend>(product: &Product<'a, Recording<B>>) -> Product<'a, B> {
    Product { weight: &product.weight.inner, bias: product.bias.map(|bias| &bias.inner) }
}

impl<B: Backend> Backend for Recording<B> {
    type Tensor = Recorded<B::Tensor>;
    type Vector = Recorded<B::Vector>;
    type Weight = Recorded<B::Weight>;
    type Experts = Recorded<B::Experts>;
    type Kv = Recorded<B::Kv>;
    type Inputs = Recorded<B::Inputs>;

    fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<Self::Tensor> {
        Ok(Recorded::new(self.inner.tensor(rows, cols, kind)?, &[rows, cols]))
    }

    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector> {
        Ok(Recorded::new(self.inner.vector(values)?, &[values.len()]))
    }

    fn weight(&mut self, matrix: &Matrix<'_>) -> Result<Self::Weight> {
        Ok(Recorded::new(self.inner.weight(matrix)?, &[matrix.num_rows(), matrix.cols()]))
    }

    fn experts(&mut self, source: ExpertsSource<'_>) -> Result<Self::Experts> {
        let rows = source.gate_up.first().map_or(0, Matrix::num_rows);
        let cols = source.gate_up.first().map_or(0, Matrix::cols);
        let shape = [source.gate_up.len(), rows, cols];
        Ok(Recorded::new(self.inner.experts(source)?, &shape))
    }

    fn kv(&mut self, shape: KvShape) -> Result<Self::Kv> {
        let sizes = [shape.layers, shape.blocks, shape.kv_heads, shape.head_dim];
        Ok(Recorded::new(self.inner.kv(shape)?, &sizes))
    }

    fn inputs(&mut self, limits: InputLimits) -> Result<Self::Inputs> {
        let InputLimits { rows, spans, outputs, table_entries, groups, ropes, rope_pairs } = limits;
        let sizes = [rows, spans, outputs, table_entries, groups, ropes, rope_pairs];
        Ok(Recorded::new(self.inner.inputs(limits)?, &sizes))
    }

    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn reads_matrices(&self) -> bool {
        self.inner.reads_matrices()
    }

    fn end_load(&mut self) {
        self.inner.end_load();
    }

    fn value_bytes(&self, kind: TensorKind) -> usize {
        self.inner.value_bytes(kind)
    }

    fn weight_bytes(&self, weight: &Self::Weight) -> u64 {
        self.inner.weight_bytes(&weight.inner)
    }

    fn experts_bytes(&self, experts: &Self::Experts) -> u64 {
        self.inner.experts_bytes(&experts.inner)
    }

    fn upload(&mut self, inputs: &mut Self::Inputs, batch: &Batch) -> StepSize {
        let sizes: [(&str, &dyn Debug); 3] =
            [("rows", &batch.num_rows()), ("spans", &batch.spans.len()), ("outputs", &batch.outputs.len())];
        self.note("upload", [inputs.id()], &sizes);
        self.inner.upload(&mut inputs.inner, batch)
    }

    fn begin(&mut self, inputs: &Self::Inputs, num_logits: usize) -> bool {
        self.note("begin", [inputs.id()], &[("num_logits", &num_logits)]);
        self.inner.begin(&inputs.inner, num_logits)
    }

    fn end(&mut self, inputs: &Self::Inputs) {
        self.note("end", [inputs.id()], &[]);
        self.inner.end(&inputs.inner);
    }

    fn records_copies(&self) -> bool {
        self.inner.records_copies()
    }

    fn forget_steps(&mut self) {
        self.inner.forget_steps();
    }

    fn check(&mut self) -> Result<()> {
        self.inner.check()
    }

    fn draws_tokens(&self) -> bool {
        self.inner.draws_tokens()
    }

    fn draw(&mut self, logits: &mut Self::Tensor, draws: &Draws) {
        self.note("draw", [logits.id()], &[("draws", &draws.draws.len())]);
        self.inner.draw(&mut logits.inner, draws);
    }

    fn is_drawn(&mut self) -> bool {
        self.inner.is_drawn()
    }

    fn drawn(&mut self, out: &mut Vec<Drawn>) -> Result<()> {
        self.inner.drawn(out)
    }

    fn rope_angles(&mut self, inputs: &mut Self::Inputs, rope: usize, inv_freq: &Self::Vector, magnitude: f32) {
        self.note("rope_angles", [inputs.id(), inv_freq.id()], &[("rope", &rope), ("magnitude", &magnitude)]);
        self.inner.rope_angles(&mut inputs.inner, rope, &inv_freq.inner, magnitude);
    }

    fn embed(&mut self, out: &mut Self::Tensor, table: &Self::Weight, inputs: &Self::Inputs, scale: f32) {
        self.note("embed", [out.id(), table.id(), inputs.id()], &[("scale", &scale)]);
        self.inner.embed(&mut out.inner, &table.inner, &inputs.inner, scale);
    }

    fn rms_norm(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, weight: &Self::Vector, eps: f32, rows: usize) {
        self.note("rms_norm", [out.id(), x.id(), weight.id()], &[("eps", &eps), ("rows", &rows)]);
        self.inner.rms_norm(&mut out.inner, &x.inner, &weight.inner, eps, rows);
    }

    fn add(&mut self, residual: &mut Self::Tensor, x: &Self::Tensor, scale: f32, rows: usize) {
        self.note("add", [residual.id(), x.id()], &[("scale", &scale), ("rows", &rows)]);
        self.inner.add(&mut residual.inner, &x.inner, scale, rows);
    }

    fn add_rms_norm(
        &mut self,
        out: &mut Self::Tensor,
        residual: &mut Self::Tensor,
        x: &Self::Tensor,
        scale: f32,
        weight: &Self::Vector,
        eps: f32,
        rows: usize,
    ) {
        let handles = [out.id(), residual.id(), x.id(), weight.id()];
        self.note("add_rms_norm", handles, &[("scale", &scale), ("eps", &eps), ("rows", &rows)]);
        let (out, residual) = (&mut out.inner, &mut residual.inner);
        self.inner.add_rms_norm(out, residual, &x.inner, scale, &weight.inner, eps, rows);
    }

    fn linear(
        &mut self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        rows: usize,
    ) {
        self.note("linear", [out.id(), x.id(), weight.id(), optional(bias)], &[("rows", &rows)]);
        self.inner.linear(&mut out.inner, &x.inner, &weight.inner, bias.map(|bias| &bias.inner), rows);
    }

    fn fused_rows(&self) -> usize {
        self.inner.fused_rows()
    }

    fn norm_linear(
        &mut self,
        out: &mut Self::Tensor,
        normed: &mut Self::Tensor,
        x: &Self::Tensor,
        norm: Norm<'_, Self>,
        product: Product<'_, Self>,
        rows: usize,
    ) {
        let handles = [out.id(), normed.id(), x.id(), norm.weight.id(), product.weight.id(), optional(product.bias)];
        self.note("norm_linear", handles, &[("eps", &norm.eps), ("rows", &rows)]);
        let (norm, product) = (inner_norm(&norm), inner_product(&product));
        self.inner.norm_linear(&mut out.inner, &mut normed.inner, &x.inner, norm, product, rows);
    }

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
    ) {
        let (norm_id, weight_id, bias) = (norm.weight.id(), product.weight.id(), optional(product.bias));
        let handles = [out.id(), gate_up.id(), normed.id(), x.id(), norm_id, weight_id, bias];
        let arguments: [(&str, &dyn Debug); 3] = [("eps", &norm.eps), ("activation", &activation), ("rows", &rows)];
        self.note("norm_linear_gated", handles, &arguments);
        let (norm, product) = (inner_norm(&norm), inner_product(&product));
        let (out, gate_up, normed) = (&mut out.inner, &mut gate_up.inner, &mut normed.inner);
        self.inner.norm_linear_gated(out, gate_up, normed, &x.inner, norm, product, activation, rows);
    }

    fn linear_add(
        &mut self,
        residual: &mut Self::Tensor,
        branch: &mut Self::Tensor,
        x: &Self::Tensor,
        product: Product<'_, Self>,
        scale: f32,
        rows: usize,
    ) {
        let handles = [residual.id(), branch.id(), x.id(), product.weight.id(), optional(product.bias)];
        self.note("linear_add", handles, &[("scale", &scale), ("rows", &rows)]);
        let (residual, branch) = (&mut residual.inner, &mut branch.inner);
        self.inner.linear_add(residual, branch, &x.inner, inner_product(&product), scale, rows);
    }

    fn fetch_ahead(&mut self, weight: &Self::Weight) {
        self.inner.fetch_ahead(&weight.inner);
    }

    fn prepare_qkv(
        &mut self,
        qkv: &mut Self::Tensor,
        kv: &mut Self::Kv,
        layer: usize,
        op: &PrepareQkv<'_, Self>,
        inputs: &Self::Inputs,
    ) {
        let handles = [qkv.id(), kv.id(), optional(op.q_norm), optional(op.k_norm), inputs.id()];
        let heads = (op.heads, op.kv_heads, op.head_dim);
        let norm = (op.norm_span, op.eps);
        let arguments: [(&str, &dyn Debug); 5] =
            [("layer", &layer), ("heads", &heads), ("group", &op.group), ("rope", &op.rope), ("norm", &norm)];
        self.note("prepare_qkv", handles, &arguments);
        let op = PrepareQkv {
            heads: op.heads,
            kv_heads: op.kv_heads,
            head_dim: op.head_dim,
            group: op.group,
            rope: op.rope,
            q_norm: op.q_norm.map(|norm| &norm.inner),
            k_norm: op.k_norm.map(|norm| &norm.inner),
            norm_span: op.norm_span,
            eps: op.eps,
        };
        self.inner.prepare_qkv(&mut qkv.inner, &mut kv.inner, layer, &op, &inputs.inner);
    }

    fn attention(
        &mut self,
        out: &mut Self::Tensor,
        qkv: &Self::Tensor,
        kv: &Self::Kv,
        layer: usize,
        op: &Attention<'_, Self>,
        inputs: &Self::Inputs,
    ) {
        let handles = [out.id(), qkv.id(), kv.id(), optional(op.sinks), inputs.id()];
        let heads = (op.heads, op.kv_heads, op.head_dim);
        let scores = (op.scale, op.window, op.soft_cap);
        let arguments: [(&str, &dyn Debug); 4] =
            [("layer", &layer), ("heads", &heads), ("group", &op.group), ("scale, window, cap", &scores)];
        self.note("attention", handles, &arguments);
        let op = Attention {
            heads: op.heads,
            kv_heads: op.kv_heads,
            head_dim: op.head_dim,
            group: op.group,
            scale: op.scale,
            window: op.window,
            soft_cap: op.soft_cap,
            sinks: op.sinks.map(|sinks| &sinks.inner),
        };
        self.inner.attention(&mut out.inner, &qkv.inner, &kv.inner, layer, &op, &inputs.inner);
    }

    fn gate(&mut self, out: &mut Self::Tensor, gate_up: &Self::Tensor, activation: Activation, rows: usize) {
        self.note("gate", [out.id(), gate_up.id()], &[("activation", &activation), ("rows", &rows)]);
        self.inner.gate(&mut out.inner, &gate_up.inner, activation, rows);
    }

    fn experts_forward(
        &mut self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        router_logits: &Self::Tensor,
        experts: &Self::Experts,
        op: &Routing<'_, Self>,
        rows: usize,
    ) {
        let handles = [out.id(), x.id(), router_logits.id(), experts.id(), optional(op.choice_bias)];
        let weights = (op.score, op.top_k, op.normalize, op.scale);
        let groups = (op.groups, op.groups_kept);
        let arguments: [(&str, &dyn Debug); 4] =
            [("rows", &rows), ("weights", &weights), ("groups", &groups), ("activation", &op.activation)];
        self.note("experts_forward", handles, &arguments);
        let op = Routing {
            score: op.score,
            top_k: op.top_k,
            normalize: op.normalize,
            scale: op.scale,
            choice_bias: op.choice_bias.map(|bias| &bias.inner),
            groups: op.groups,
            groups_kept: op.groups_kept,
            activation: op.activation,
        };
        let (x, logits) = (&x.inner, &router_logits.inner);
        self.inner.experts_forward(&mut out.inner, x, logits, &experts.inner, &op, rows);
    }

    fn add_gated(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, gate: &Self::Tensor, rows: usize) {
        self.note("add_gated", [out.id(), x.id(), gate.id()], &[("rows", &rows)]);
        self.inner.add_gated(&mut out.inner, &x.inner, &gate.inner, rows);
    }

    fn gather_outputs(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, inputs: &Self::Inputs) {
        self.note("gather_outputs", [out.id(), x.id(), inputs.id()], &[]);
        self.inner.gather_outputs(&mut out.inner, &x.inner, &inputs.inner);
    }

    fn finish_logits(&mut self, logits: &mut Self::Tensor, scale: f32, soft_cap: Option<f32>, rows: usize) {
        self.note("finish_logits", [logits.id()], &[("scale", &scale), ("cap", &soft_cap), ("rows", &rows)]);
        self.inner.finish_logits(&mut logits.inner, scale, soft_cap, rows);
    }

    fn copy_columns(&mut self, out: &mut Self::Tensor, column: usize, x: &Self::Tensor, rows: usize) {
        self.note("copy_columns", [out.id(), x.id()], &[("column", &column), ("rows", &rows)]);
        self.inner.copy_columns(&mut out.inner, column, &x.inner, rows);
    }

    fn copy_rows(&mut self, out: &mut Self::Tensor, x: &Self::Tensor, pairs: &[(u32, u32)]) {
        self.note("copy_rows", [out.id(), x.id()], &[("pairs", &pairs.len())]);
        self.inner.copy_rows(&mut out.inner, &x.inner, pairs);
    }

    fn copy_blocks(&mut self, kv: &mut Self::Kv, pairs: &[(u32, u32)]) {
        self.note("copy_blocks", [kv.id()], &[]);
        self.inner.copy_blocks(&mut kv.inner, pairs);
    }

    fn move_tokens(&mut self, kv: &mut Self::Kv, pairs: &[(u32, u32)]) {
        self.note("move_tokens", [kv.id()], &[]);
        self.inner.move_tokens(&mut kv.inner, pairs);
    }

    fn upload_rows(&mut self, tensor: &mut Self::Tensor, values: &[f32]) {
        self.note("upload_rows", [tensor.id()], &[("values", &values.len())]);
        self.inner.upload_rows(&mut tensor.inner, values);
    }

    fn download(&mut self, tensor: &Self::Tensor, rows: usize, out: &mut Vec<f32>) {
        self.note("download", [tensor.id()], &[("rows", &rows)]);
        self.inner.download(&tensor.inner, rows, out);
    }

    fn save_block(&mut self, kv: &Self::Kv, block: u32, out: &mut [u8]) {
        self.note("save_block", [kv.id()], &[("bytes", &out.len())]);
        self.inner.save_block(&kv.inner, block, out);
    }

    fn load_block(&mut self, kv: &mut Self::Kv, block: u32, bytes: &[u8]) {
        self.note("load_block", [kv.id()], &[("bytes", &bytes.len())]);
        self.inner.load_block(&mut kv.inner, block, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::Reference;

    /// A norm and a sum on the same tensors, `rows` of them.
    fn step(
        backend: &mut Recording<Reference>,
        x: &mut Recorded<crate::reference::Tensor>,
        y: &mut Recorded<crate::reference::Tensor>,
        norm: &Recorded<crate::reference::Vector>,
        rows: usize,
    ) -> Vec<RecordingOp> {
        backend.rms_norm(y, x, norm, 1e-6, rows);
        backend.add(x, y, 0.5, rows);
        backend.take_log()
    }

    #[test]
    fn equal_steps_have_equal_logs_and_others_do_not() {
        let mut backend = Recording::new(Reference::new());
        let mut x = backend.tensor(4, 3, TensorKind::Activation).unwrap();
        let mut y = backend.tensor(4, 3, TensorKind::Activation).unwrap();
        let norm = backend.vector(&[1.0, 2.0, 3.0]).unwrap();
        let first = step(&mut backend, &mut x, &mut y, &norm, 2);
        assert_eq!(first.iter().map(|op| op.name).collect::<Vec<_>>(), ["rms_norm", "add"]);
        assert_eq!(first[0].handles[1].shape, [4, 3]);
        assert_eq!(first, step(&mut backend, &mut x, &mut y, &norm, 2));
        assert_ne!(first, step(&mut backend, &mut x, &mut y, &norm, 3), "another number of rows");
        assert_ne!(first, step(&mut backend, &mut y, &mut x, &norm, 2), "other memory");
        let mut rebuilt = backend.tensor(4, 3, TensorKind::Activation).unwrap();
        assert_ne!(first, step(&mut backend, &mut x, &mut rebuilt, &norm, 2), "a handle made anew");
    }
}
