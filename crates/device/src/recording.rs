//! A backend that logs the operations asked of another: the name of each, its numbers, and the
//! shape and address of every handle it touches.
//!
//! A device may record a step once and replay it only if two steps of the same size ask for exactly
//! the same operations on exactly the same memory. That is a property of the callers, and the log
//! makes it a test: two equal logs are two replayable steps. A handle's address is that of the
//! inner backend's handle, so one that was rebuilt or moved between steps shows. Contents that
//! change from step to step without changing the work (token ids, positions, block numbers) go
//! through `upload`, `copy_blocks`, `move_tokens`, `save_block` and `load_block` and are not
//! logged.

use std::{
    borrow::{Borrow, BorrowMut},
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, PoisonError},
};

use folio_formats::Matrix;

use crate::{
    Backend, Batch, BlockCopies, Drawn, Draws, ExpertsSource, Handles, InputLimits, Intercept, KvShape, Memory, Op,
    Result, Sampling, StepSize, Steps, TensorKind,
};

/// One operation as it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordingOp {
    pub name: &'static str,
    /// The operation with its arguments: numbers by value, lists by length, handles by address and
    /// shape.
    pub text: String,
}

/// The operations so far. Clones share one list, so that a test keeps one after the backend has
/// moved into a decoder.
#[derive(Clone, Debug, Default)]
pub struct Log(Arc<Mutex<Vec<RecordingOp>>>);

impl Log {
    /// The operations since the last call.
    pub fn take(&self) -> Vec<RecordingOp> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, name: &'static str, text: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(RecordingOp { name, text });
    }
}

/// Passes every operation on to `inner` and logs it. Handles are made once, at start, which is not
/// logged.
pub struct Recording<B> {
    inner: B,
    log: Log,
}

impl<B> Debug for Recording<B> {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        out.debug_struct("Recording").field("log", &self.log).finish_non_exhaustive()
    }
}

/// A handle of the inner backend with the shape it was made with.
pub struct Recorded<T> {
    inner: T,
    shape: Vec<usize>,
}

impl<T> Recorded<T> {
    fn new(inner: T, shape: &[usize]) -> Self {
        Self { inner, shape: shape.to_vec() }
    }
}

impl<T> Borrow<T> for Recorded<T> {
    fn borrow(&self) -> &T {
        &self.inner
    }
}

impl<T> BorrowMut<T> for Recorded<T> {
    fn borrow_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T> Debug for Recorded<T> {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "{:#x}{:?}", std::ptr::from_ref(&self.inner).addr(), self.shape)
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
}

impl<B: Backend> Handles for Recording<B> {
    type Tensor = Recorded<B::Tensor>;
    type Vector = Recorded<B::Vector>;
    type Weight = Recorded<B::Weight>;
    type Experts = Recorded<B::Experts>;
    type Kv = Recorded<B::Kv>;
    type Inputs = Recorded<B::Inputs>;
}

impl<B: Backend> Intercept for Recording<B> {
    const WHOLE: bool = true;

    fn intercept(&mut self, op: Op<'_, Self>) {
        self.log.push(op.name(), format!("{op:?}"));
        op.inner().run(&mut self.inner);
    }
}

impl<B: Backend> Memory for Recording<B> {
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
}

impl<B: Backend> Steps for Recording<B> {
    fn numerics(&self) -> String {
        self.inner.numerics()
    }

    fn fused_rows(&self) -> usize {
        self.inner.fused_rows()
    }

    fn records_copies(&self) -> bool {
        self.inner.records_copies()
    }

    fn upload(&mut self, inputs: &mut Self::Inputs, batch: &Batch) -> StepSize {
        let (rows, spans, outputs) = (batch.num_rows(), batch.spans.len(), batch.outputs.len());
        self.log.push("upload", format!("upload {inputs:?} rows {rows} spans {spans} outputs {outputs}"));
        self.inner.upload(&mut inputs.inner, batch)
    }

    fn begin(&mut self, inputs: &Self::Inputs, num_logits: usize) -> bool {
        self.log.push("begin", format!("begin {inputs:?} logits {num_logits}"));
        self.inner.begin(&inputs.inner, num_logits)
    }

    fn end(&mut self, inputs: &Self::Inputs) {
        self.log.push("end", format!("end {inputs:?}"));
        self.inner.end(&inputs.inner);
    }

    fn forget_steps(&mut self) {
        self.inner.forget_steps();
    }

    fn check(&mut self) -> Result<()> {
        self.inner.check()
    }
}

impl<B: Backend> Sampling for Recording<B> {
    fn draws_tokens(&self) -> bool {
        self.inner.draws_tokens()
    }

    fn draw(&mut self, logits: &mut Self::Tensor, draws: &Draws) {
        self.log.push("draw", format!("draw {logits:?} draws {}", draws.draws.len()));
        self.inner.draw(&mut logits.inner, draws);
    }

    fn is_drawn(&mut self) -> bool {
        self.inner.is_drawn()
    }

    fn drawn(&mut self, out: &mut Vec<Drawn>) -> Result<()> {
        self.inner.drawn(out)
    }
}

impl<B: Backend> BlockCopies for Recording<B> {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Operations;
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
        assert!(first[0].text.contains("[4, 3]") && first[0].text.ends_with("rows: 2 }"), "{}", first[0].text);
        assert_eq!(first, step(&mut backend, &mut x, &mut y, &norm, 2));
        assert_ne!(first, step(&mut backend, &mut x, &mut y, &norm, 3), "another number of rows");
        assert_ne!(first, step(&mut backend, &mut y, &mut x, &norm, 2), "other memory");
        let mut rebuilt = backend.tensor(4, 3, TensorKind::Activation).unwrap();
        assert_ne!(first, step(&mut backend, &mut x, &mut rebuilt, &norm, 2), "a handle made anew");
    }
}
