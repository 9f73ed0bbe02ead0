//! The memory that operations work on: handles of opaque types, made once at start.

use folio_formats::Matrix;

use crate::{KvShape, Result};

/// The types of a backend's handles. [`Op`](crate::Op) and the argument structs of operations are
/// generic over this family alone.
pub trait Handles: Sized + Send + 'static {
    /// f32-valued activations `[rows, cols]`; the device may hold them in a narrower type, see
    /// [`TensorKind`].
    type Tensor: Send;
    /// A short constant vector: norm weights, biases, sinks, inverse frequencies.
    type Vector: Send;
    /// `[outputs, inputs]` of one linear layer (or an embedding table), in the layout its kernels
    /// stream.
    type Weight: Send;
    /// The experts of one layer.
    type Experts: Send;
    /// Paged keys and values of one layer group.
    type Kv: Send;
    /// The inputs of one step: ids, positions, spans, block tables, and the scratch that their
    /// number asks for.
    type Inputs: Send;
}

/// Makes handles and tells their sizes.
pub trait Memory: Handles {
    fn tensor(&mut self, rows: usize, cols: usize, kind: TensorKind) -> Result<Self::Tensor>;
    fn vector(&mut self, values: &[f32]) -> Result<Self::Vector>;
    /// Copies and repacks; the matrix's bytes are not needed afterwards.
    fn weight(&mut self, matrix: &Matrix<'_>) -> Result<Self::Weight>;
    fn experts(&mut self, source: ExpertsSource<'_>) -> Result<Self::Experts>;
    fn kv(&mut self, shape: KvShape) -> Result<Self::Kv>;
    fn inputs(&mut self, limits: InputLimits) -> Result<Self::Inputs>;

    /// Whether the values of matrices are read; if only their sizes are, the values need not be
    /// computed.
    fn reads_matrices(&self) -> bool {
        true
    }

    /// All weights of a model are made; those that follow belong to another.
    fn end_load(&mut self) {}

    /// Bytes of one value of a tensor.
    fn value_bytes(&self, _kind: TensorKind) -> usize {
        size_of::<f32>()
    }

    /// Bytes a weight occupies on the device, padding included.
    fn weight_bytes(&self, weight: &Self::Weight) -> u64;
    /// Bytes a layer's experts occupy on the device, padding and biases included.
    fn experts_bytes(&self, experts: &Self::Experts) -> u64;
}

/// The use of a tensor: devices that hold activations in a narrower type hold some of them in f32
/// all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorKind {
    /// The residual stream, and rows picked from it.
    Stream,
    /// Inputs and outputs of matrix products.
    Activation,
    /// Logits, of tokens and of routers.
    Scores,
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

/// All experts of one layer, as matrices; gate rows lie above up rows.
pub struct ExpertsSource<'a> {
    pub gate_up: Vec<Matrix<'a>>,
    pub down: Vec<Matrix<'a>>,
    /// `[experts][2 * inter]` and `[experts][hidden]`.
    pub gate_up_bias: Option<Vec<Vec<f32>>>,
    pub down_bias: Option<Vec<Vec<f32>>>,
}
