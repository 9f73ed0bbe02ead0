//! Reproducible inputs: numbers from a seed, matrices in every format, and tensors filled from the
//! host.

use std::{borrow::Cow, cell::Cell, sync::OnceLock};

use folio_device::{Backend, Batch, GroupTables, InputLimits, Span, TensorKind};
use folio_formats::{Format, Matrix};
use half::{bf16, f16};

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bf0_3635_d1a3_c0de)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit as u64) as usize
    }

    /// Mean 0, deviation 1, close enough to normal.
    pub fn value(&mut self) -> f32 {
        let uniform = |random: &mut Self| (random.bits() >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
        (0..4).map(|_| uniform(self)).sum::<f32>() * 3f32.sqrt()
    }

    pub fn values(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.value()).collect()
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for end in (1..items.len()).rev() {
            items.swap(end, self.below(end + 1));
        }
    }
}

pub fn round_to_bf16(values: &mut [f32]) {
    values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
}

/// Rows of f32, as a matrix.
pub fn f32_matrix(cols: usize, values: &[f32]) -> Matrix<'static> {
    let bytes = |row: &[f32]| Cow::Owned(row.iter().flat_map(|value| value.to_le_bytes()).collect());
    Matrix::from_rows(Format::F32, cols, values.chunks_exact(cols).map(bytes).collect()).unwrap()
}

/// A random matrix in any format. Quantized rows are assembled from random blocks of a sensible
/// size, found by trial: this file knows no block layout.
pub fn matrix(format: Format, rows: usize, cols: usize, seed: u64) -> Matrix<'static> {
    let mut random = Random::new(seed);
    let row: Box<dyn FnMut() -> Vec<u8>> = match format {
        Format::F32 => Box::new(move || random.values(cols).into_iter().flat_map(f32::to_le_bytes).collect()),
        Format::F16 => Box::new(move || {
            random.values(cols).into_iter().flat_map(|value| f16::from_f32(value).to_le_bytes()).collect()
        }),
        Format::BF16 => Box::new(move || {
            random.values(cols).into_iter().flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect()
        }),
        _ => {
            let blocks = blocks(format);
            let count = cols / format.block_len();
            Box::new(move || (0..count).flat_map(|_| blocks[random.below(blocks.len())].clone()).collect())
        }
    };
    let rows = std::iter::repeat_with(row).take(rows).map(Cow::Owned).collect();
    Matrix::from_rows(format, cols, rows).unwrap()
}

/// Some blocks of a format, found once.
fn blocks(format: Format) -> &'static [Vec<u8>] {
    static BLOCKS: [OnceLock<Vec<Vec<u8>>>; 32] = [const { OnceLock::new() }; 32];
    BLOCKS[format as usize].get_or_init(|| {
        let mut random = Random::new(format as u64);
        (0..40).map(|_| block(format, &mut random)).collect()
    })
}

fn block(format: Format, random: &mut Random) -> Vec<u8> {
    let mut values = vec![0.0; format.block_len()];
    loop {
        let bytes: Vec<u8> = (0..format.block_bytes()).map(|_| random.bits() as u8).collect();
        format.decode(&bytes, &mut values);
        let largest = values
            .iter()
            .fold(0.0f32, |largest, value| if value.is_nan() { f32::NAN } else { largest.max(value.abs()) });
        if (0.2..8.0).contains(&largest) {
            return bytes;
        }
    }
}

/// Root mean square of the row with the largest one.
pub fn deviation(matrix: &Matrix<'_>) -> f32 {
    let mut row = vec![0.0; matrix.cols()];
    let mut largest = 0.0f64;
    for index in 0..matrix.num_rows() {
        matrix.read_row(index, &mut row);
        largest = largest.max(row.iter().map(|&value| f64::from(value).powi(2)).sum());
    }
    (largest / matrix.cols() as f64).sqrt() as f32
}

/// A step of one span with these token ids.
pub fn batch(tokens: &[u32], outputs: Vec<u32>) -> Batch {
    let rows = tokens.len() as u32;
    Batch {
        tokens: tokens.to_vec(),
        positions: (0..rows).collect(),
        spans: vec![Span { first_row: 0, num_rows: rows, context: rows }],
        ancestors: Vec::new(),
        groups: vec![GroupTables {
            slots: (0..rows).collect(),
            blocks: (0..rows.div_ceil(16)).collect(),
            first_block: vec![0],
        }],
        outputs,
    }
}

/// Uploaded inputs of that step.
pub fn inputs<B: Backend>(backend: &mut B, batch: &Batch) -> B::Inputs {
    let limits = InputLimits {
        rows: batch.num_rows(),
        spans: batch.spans.len(),
        outputs: batch.outputs.len(),
        table_entries: batch.groups[0].blocks.len(),
        groups: 1,
        ropes: 1,
        rope_pairs: 128,
    };
    let mut inputs = backend.inputs(limits).unwrap();
    backend.upload(&mut inputs, batch);
    inputs
}

thread_local! {
    /// Whether activations are rounded to bf16 before any backend of this thread sees them: a
    /// backend that holds them so then starts from the same numbers as the reference.
    static ROUNDED: Cell<bool> = const { Cell::new(false) };
}

pub fn round_activations(rounded: bool) {
    ROUNDED.set(rounded);
}

pub fn rounds_activations() -> bool {
    ROUNDED.get()
}

/// A tensor that holds `values`.
pub fn tensor<B: Backend>(backend: &mut B, cols: usize, values: &[f32], kind: TensorKind) -> B::Tensor {
    let mut values = values.to_vec();
    if ROUNDED.get() && kind == TensorKind::Activation {
        round_to_bf16(&mut values);
    }
    let mut tensor = backend.tensor(values.len() / cols, cols, kind).unwrap();
    backend.upload_rows(&mut tensor, &values);
    tensor
}

/// The same in another way: the values become an embedding table with rows that are looked up in
/// order.
pub fn embedded<B: Backend>(backend: &mut B, cols: usize, values: &[f32]) -> B::Tensor {
    let rows = values.len() / cols;
    let table = backend.weight(&f32_matrix(cols, values)).unwrap();
    let ids: Vec<u32> = (0..rows as u32).collect();
    let inputs = inputs(backend, &batch(&ids, Vec::new()));
    let mut tensor = backend.tensor(rows, cols, TensorKind::Stream).unwrap();
    backend.embed(&mut tensor, &table, &inputs, 1.0);
    tensor
}

pub fn download<B: Backend>(backend: &mut B, tensor: &B::Tensor, rows: usize) -> Vec<f32> {
    // Earlier contents of the vector must not matter.
    let mut out = vec![7.0; 3];
    backend.download(tensor, rows, &mut out);
    out
}
