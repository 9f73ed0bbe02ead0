//! Backends around other backends.

use std::borrow::{Borrow, BorrowMut};

use folio_formats::Matrix;

use crate::{Backend, ExpertsSource, Handles, InputLimits, KvShape, Memory, Op, Result, TensorKind};

/// A backend that takes every operation as a value. A wrapper looks at some of them, and passes the
/// rest on: `op.inner().run(&mut self.inner)`.
pub trait Intercept: Handles {
    /// Whether operations that have a default come as they are called. If not, the default runs,
    /// and the operations that it calls come instead.
    const WHOLE: bool = false;

    fn intercept(&mut self, op: Op<'_, Self>);
}

/// Handles that hold those of `B`, or are the same. Implemented for each family that [`Borrow`]
/// says it of.
pub trait Wraps<B: Handles>:
    Handles<
        Tensor: BorrowMut<B::Tensor>,
        Vector: Borrow<B::Vector>,
        Weight: Borrow<B::Weight>,
        Experts: Borrow<B::Experts>,
        Kv: BorrowMut<B::Kv>,
        Inputs: BorrowMut<B::Inputs>,
    >
{
}

impl<H, B> Wraps<B> for H
where
    B: Handles,
    H: Handles<
            Tensor: BorrowMut<B::Tensor>,
            Vector: Borrow<B::Vector>,
            Weight: Borrow<B::Weight>,
            Experts: Borrow<B::Experts>,
            Kv: BorrowMut<B::Kv>,
            Inputs: BorrowMut<B::Inputs>,
        >,
{
}

/// A backend that leaves its memory to the backend inside: their handles are the same.
pub trait Wrapper: Send + 'static {
    type Inner: Backend;

    fn inner(&self) -> &Self::Inner;
    fn inner_mut(&mut self) -> &mut Self::Inner;
}

impl<W: Wrapper> Handles for W {
    type Tensor = <W::Inner as Handles>::Tensor;
    type Vector = <W::Inner as Handles>::Vector;
    type Weight = <W::Inner as Handles>::Weight;
    type Experts = <W::Inner as Handles>::Experts;
    type Kv = <W::Inner as Handles>::Kv;
    type Inputs = <W::Inner as Handles>::Inputs;
}

impl<W: Wrapper> Memory for W {
    fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<Self::Tensor> {
        self.inner_mut().tensor(rows, cols, kind)
    }

    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector> {
        self.inner_mut().vector(values)
    }

    fn weight(&mut self, matrix: &Matrix<'_>) -> Result<Self::Weight> {
        self.inner_mut().weight(matrix)
    }

    fn experts(&mut self, source: ExpertsSource<'_>) -> Result<Self::Experts> {
        self.inner_mut().experts(source)
    }

    fn kv(&mut self, shape: KvShape) -> Result<Self::Kv> {
        self.inner_mut().kv(shape)
    }

    fn inputs(&mut self, limits: InputLimits) -> Result<Self::Inputs> {
        self.inner_mut().inputs(limits)
    }

    fn reads_matrices(&self) -> bool {
        self.inner().reads_matrices()
    }

    fn end_load(&mut self) {
        self.inner_mut().end_load();
    }

    fn value_bytes(&self, kind: TensorKind) -> usize {
        self.inner().value_bytes(kind)
    }

    fn weight_bytes(&self, weight: &Self::Weight) -> u64 {
        self.inner().weight_bytes(weight)
    }

    fn experts_bytes(&self, experts: &Self::Experts) -> u64 {
        self.inner().experts_bytes(experts)
    }
}
