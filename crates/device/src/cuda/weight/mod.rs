//! Weights on the device: plain values in their stored order, codes packed for the kernels that
//! stream them.
//!
//! A matrix becomes one run of outputs for each of its parts, so that a stack of parts keeps each
//! one's format; neighbours of the same form are joined. Codes that no kernel can read are decoded
//! (see [`form::Form::of`]).

mod codes;
mod form;
mod load;
mod plain;
#[cfg(test)]
mod tests;

use std::ops::Range;

use folio_formats::{Levels, Matrix, Part};

pub(super) use form::{CHUNK, CHUNK_BYTES, Code, Coded, Form};
pub(super) use load::Loader;

use super::driver::{Buffer, Device, args};
use super::gemm90::{Gemm90, Scales90, Weight90};
use super::launch;
use super::linear_few::Few;
use super::linear_stream::Streamed;
use super::tensor::Float;
use super::{Precision, RandomForm};
use crate::{Error, ExpertsSource, Result};
use codes::{Row, Tile};
use form::{FLOAT8_ROWS, ONE_127TH};
use load::Target;

pub struct Weight {
    pub(super) n: usize,
    pub(super) k: usize,
    /// Type of the activations that multiply it.
    pub(super) float: Float,
    runs: Vec<Run>,
    /// In the form of Hopper's kernels, if it is one run of bf16 or of eight-bit floats.
    pub(super) hopper: Option<Weight90>,
}

/// Neighbouring outputs of the same form.
pub(super) struct Run {
    pub first: usize,
    pub outputs: usize,
    pub form: Form,
    pub buffer: Buffer,
    pub layout: Layout,
    /// Geometry for streaming kernels; none if they cannot take it.
    pub streamed: Option<Streamed>,
    /// Geometry for the kernels of few rows.
    pub few: Option<Few>,
}

/// Offsets in a run's buffer; codes or values begin at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub data_bytes: usize,
    /// Scales of groups or blocks.
    pub scales: Option<(usize, usize)>,
    /// One f32 per output, which multiplies the whole sum.
    pub factors: Option<(usize, usize)>,
    pub bytes: usize,
}

impl Layout {
    fn of(form: &Form, outputs: usize, inputs: usize) -> Self {
        let chunks = inputs.div_ceil(CHUNK);
        let (data_bytes, scale_bytes, factor_bytes) = match form {
            Form::Plain(float) => (outputs * inputs * float.bytes(), 0, 0),
            Form::Float8 { blocks: true } => (outputs * inputs, outputs.div_ceil(FLOAT8_ROWS) * chunks * 4, 0),
            Form::Float8 { blocks: false } => (outputs * inputs, 0, outputs * 4),
            Form::Coded(coded) => {
                let tiles = outputs.div_ceil(coded.rows());
                let scales = tiles * chunks * coded.scale_bytes();
                (tiles * chunks * CHUNK_BYTES, scales, tiles * coded.rows() * 4)
            }
        };
        let scales_at = data_bytes.next_multiple_of(256);
        let factors_at = (scales_at + scale_bytes).next_multiple_of(256);
        let bytes = match (scale_bytes, factor_bytes) {
            (0, 0) => data_bytes,
            (_, 0) => scales_at + scale_bytes,
            _ => factors_at + factor_bytes,
        };
        let some = |at: usize, bytes: usize| (bytes > 0).then_some((at, bytes));
        Self { data_bytes, scales: some(scales_at, scale_bytes), factors: some(factors_at, factor_bytes), bytes }
    }
}

impl Weight {
    pub(super) fn load(loader: &mut Loader, gemm: Option<&Gemm90>, matrix: &Matrix<'_>, float: Float) -> Result<Self> {
        let device = loader.device().clone();
        let runs = Plan::of(matrix, float).iter().map(|plan| plan.load(loader)).collect::<Result<Vec<_>>>()?;
        Self::of_runs(&device, gemm, (matrix.num_rows(), matrix.cols()), float, runs)
    }

    /// Random values generated on the device from a seed, in the forms that this matrix would have,
    /// or in the given one.
    pub(super) fn random(
        device: &Device,
        gemm: Option<&Gemm90>,
        matrix: &Matrix<'_>,
        float: Float,
        (seed, form): (u64, RandomForm),
    ) -> Result<Self> {
        let runs = Plan::of_random(matrix, float, form)
            .iter()
            .map(|plan| plan.random(device, seed))
            .collect::<Result<Vec<_>>>()?;
        Self::of_runs(device, gemm, (matrix.num_rows(), matrix.cols()), float, runs)
    }

    fn of_runs(
        device: &Device,
        gemm: Option<&Gemm90>,
        (n, k): (usize, usize),
        float: Float,
        runs: Vec<Run>,
    ) -> Result<Self> {
        let mut weight = Self { n, k, float, runs, hopper: None };
        if let (Some(gemm), [run], true) = (gemm, &weight.runs[..], Gemm90::fits(k, 1)) {
            let ptr = run.buffer.ptr();
            weight.hopper = match run.form {
                Form::Plain(Float::Bf16) => Some(gemm.weight(device, ptr, n, k)?),
                Form::Float8 { blocks } => {
                    let scales = Scales90 { ptr: if blocks { run.scales() } else { run.factors() }, blocks };
                    Some(gemm.float8_weight(device, ptr, n, k, scales)?)
                }
                _ => None,
            };
        }
        Ok(weight)
    }

    /// The address of its values if they are plain.
    pub(super) fn plain(&self) -> Option<u64> {
        self.plain_float().map(|_| self.runs[0].buffer.ptr())
    }

    fn plain_float(&self) -> Option<Float> {
        match &self.runs[..] {
            [Run { form: Form::Plain(float), .. }] => Some(*float),
            _ => None,
        }
    }

    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.buffer.bytes() as u64).sum()
    }
}

impl Run {
    pub fn scales(&self) -> u64 {
        self.layout.scales.map_or(0, |(at, _)| self.buffer.ptr() + at as u64)
    }

    pub fn factors(&self) -> u64 {
        self.layout.factors.map_or(0, |(at, _)| self.buffer.ptr() + at as u64)
    }
}

/// Taller matrices are considered a vocabulary's.
const MOST_LAYER_OUTPUTS: usize = 65_536;

fn random_form(form: RandomForm) -> Option<Form> {
    let coded = |code| Some(Form::Coded(Coded { code, affine: false, group: CHUNK }));
    match form {
        RandomForm::Plain => None,
        RandomForm::Float8 => Some(Form::Float8 { blocks: false }),
        RandomForm::Int8 => coded(Code::Byte),
        RandomForm::Int4 => coded(Code::Nibble { least: -8 }),
    }
}

/// Parts that become one run.
struct Plan<'m, 'a> {
    first: usize,
    outputs: usize,
    inputs: usize,
    form: Form,
    parts: &'m [Part<'a>],
}

impl<'m, 'a> Plan<'m, 'a> {
    fn of(matrix: &'m Matrix<'a>, float: Float) -> Vec<Self> {
        let parts = matrix.parts();
        let forms: Vec<Form> = parts.iter().map(|part| Form::of(part, float)).collect();
        let mut plans: Vec<Self> = Vec::new();
        let (mut start, mut first) = (0, 0);
        while start < parts.len() {
            // Scales of blocks restart with every part, unless the previous part has whole blocks.
            let joins = |place: usize| {
                forms[start] != Form::Float8 { blocks: true } || parts[place - 1].num_rows().is_multiple_of(FLOAT8_ROWS)
            };
            let mut alike = 1;
            while start + alike < parts.len() && forms[start + alike] == forms[start] && joins(start + alike) {
                alike += 1;
            }
            let range: Range<usize> = start..start + alike;
            let outputs = parts[range.clone()].iter().map(Part::num_rows).sum();
            if outputs > 0 {
                let (form, parts) = (forms[start], &parts[range]);
                plans.push(Self { first, outputs, inputs: matrix.cols(), form, parts });
            }
            (start, first) = (start + alike, first + outputs);
        }
        plans
    }

    /// Runs of a matrix with generated values, in the given form.
    fn of_random(matrix: &'m Matrix<'a>, float: Float, form: RandomForm) -> Vec<Self> {
        let mut plans = Self::of(matrix, float);
        let is_layer = matrix.num_rows() <= MOST_LAYER_OUTPUTS && matrix.cols().is_multiple_of(CHUNK);
        if let ([plan], Some(form), true) = (&mut plans[..], random_form(form), is_layer && float == Float::Bf16) {
            plan.form = form;
        }
        plans
    }

    fn layout(&self) -> Layout {
        Layout::of(&self.form, self.outputs, self.inputs)
    }

    fn run(&self, device: &Device) -> Result<Run> {
        let layout = self.layout();
        let buffer = device.alloc("a weight", layout.bytes)?;
        let streamed = Streamed::new(device, &self.form, self.outputs, self.inputs);
        let few = Few::new(device, &self.form, self.outputs, self.inputs);
        Ok(Run { first: self.first, outputs: self.outputs, form: self.form, buffer, layout, streamed, few })
    }

    /// The part that holds output `output`, and the row there.
    fn locate(&self, output: usize) -> (&'m Part<'a>, usize) {
        let mut row = output;
        for part in self.parts {
            if row < part.num_rows() {
                return (part, row);
            }
            row -= part.num_rows();
        }
        panic!("output {output} of {}", self.outputs);
    }

    fn load(&self, loader: &mut Loader) -> Result<Run> {
        let run = self.run(&loader.device().clone())?;
        let target = |(offset, bytes): (usize, usize), units: usize| Target {
            buffer: &run.buffer,
            offset,
            unit_bytes: bytes / units.max(1),
        };
        let data = |units: usize| target((0, run.layout.data_bytes), units);
        match self.form {
            Form::Plain(float) => loader.load(self.outputs, [data(self.outputs)], |output, [values]| {
                let (part, row) = self.locate(output);
                plain::read_row(part, row, float, values);
            })?,
            Form::Float8 { .. } => {
                loader.load(self.outputs, [data(self.outputs)], |output, [codes]| {
                    let (part, row) = self.locate(output);
                    let (_, rows) = part.grouped_rows().expect("eight-bit floats have scales beside them");
                    codes.copy_from_slice(&rows[row].codes);
                })?;
                let scales = run.layout.scales.or(run.layout.factors).expect("one of them");
                loader.load(1, [target(scales, 1)], |_, [place]| {
                    let mut rest = place;
                    for part in self.parts {
                        let own = match run.layout.scales {
                            Some(_) => 4 * part.num_rows().div_ceil(FLOAT8_ROWS) * self.inputs.div_ceil(CHUNK),
                            None => 4 * part.num_rows(),
                        };
                        let (own, after) = rest.split_at_mut(own);
                        put_float8_scales(part, own);
                        rest = after;
                    }
                })?;
            }
            Form::Coded(coded) => {
                let tiles = self.outputs.div_ceil(coded.rows());
                let (scales, factors) = (run.layout.scales.expect("groups"), run.layout.factors.expect("outputs"));
                let targets = [data(tiles), target(scales, tiles), target(factors, tiles)];
                loader.load(tiles, targets, |tile, [codes, scales, factors]| {
                    self.pack_tile(&coded, tile, Tile { codes, scales, factors });
                })?;
            }
        }
        Ok(run)
    }

    fn pack_tile(&self, coded: &Coded, number: usize, mut tile: Tile<'_>) {
        let mut row = Row::default();
        let first = number * coded.rows();
        for index in 0..coded.rows().min(self.outputs - first) {
            let (part, from) = self.locate(first + index);
            read_coded(part, from, coded, &mut row);
            tile.put(coded, index, &mut row);
        }
    }

    fn random(&self, device: &Device, seed: u64) -> Result<Run> {
        let run = self.run(device)?;
        let (grid, data) = ([16 * device.info().multiprocessors, 1, 1], run.layout.data_bytes);
        let (count, size) = ((self.outputs * self.inputs) as i64, (1.0 / self.inputs as f32).sqrt());
        let (ptr, factors) = (run.buffer.ptr(), run.factors());
        // About the value of a code before scaling.
        let spread = match self.form {
            Form::Plain(Float::F32) => {
                launch(device, "random_f32", grid, 256, args![ptr, count, seed, size, 0.0f32]);
                1.0
            }
            Form::Plain(Float::Bf16) => {
                launch(device, "random_bf16", grid, 256, args![ptr, count, seed, size]);
                1.0
            }
            Form::Float8 { .. } => {
                launch(device, "random_e4m3", grid, 256, args![ptr, data as i64, seed]);
                32.0
            }
            Form::Coded(coded) => {
                launch(device, "random_bytes", grid, 256, args![ptr, data as i64, seed]);
                if coded.rows() == 16 { 74.0 } else { 4.6 }
            }
        };
        for (at, bytes) in run.layout.scales.into_iter() {
            if let Form::Coded(_) = self.form {
                // Nearly one in f16.
                device.fill(&run.buffer, at, bytes, 0x3c);
            } else {
                let (to, count) = (ptr + at as u64, (bytes / 4) as i64);
                launch(device, "random_f32", grid, 256, args![to, count, seed, 0.0f32, size / spread]);
            }
        }
        if let Some((_, bytes)) = run.layout.factors {
            let count = (bytes / 4) as i64;
            launch(device, "random_f32", grid, 256, args![factors, count, seed, 0.0f32, size / spread]);
        }
        Ok(run)
    }
}

/// One f32 per output, or one for every 128 outputs and 128 inputs.
fn put_float8_scales(part: &Part<'_>, place: &mut [u8]) {
    let (grouped, rows) = part.grouped_rows().expect("eight-bit floats have scales beside them");
    let (places, _) = place.as_chunks_mut::<4>();
    if grouped.group >= part.cols() {
        for (place, row) in places.iter_mut().zip(rows) {
            *place = row.scales[0].to_le_bytes();
        }
        return;
    }
    let chunks = part.cols().div_ceil(CHUNK);
    for (line, rows) in places.chunks_exact_mut(chunks).zip(rows.chunks(FLOAT8_ROWS)) {
        for (chunk, place) in line.iter_mut().enumerate() {
            *place = rows[0].scales[chunk * CHUNK / grouped.group].to_le_bytes();
        }
    }
}

/// One row in the layout's form: bytes as levels, scales for the layout's groups.
fn read_coded(part: &Part<'_>, index: usize, coded: &Coded, row: &mut Row) {
    let (cols, groups) = (part.cols(), part.cols().div_ceil(coded.group));
    row.codes.clear();
    row.scales.clear();
    row.minimums.clear();
    if let Some((grouped, rows)) = part.grouped_rows() {
        let (from, stored) = (&rows[index], grouped.group.min(cols));
        row.codes.extend_from_slice(&from.codes);
        let by = if grouped.levels == folio_formats::GroupedLevels::Of127 { ONE_127TH } else { 1.0 };
        row.scales.extend((0..groups).map(|group| from.scales[group * coded.group / stored] * by));
        if !from.minimums.is_empty() {
            row.minimums.extend((0..groups).map(|group| from.minimums[group * coded.group / stored]));
        }
        return;
    }
    let coding = part.coding().expect("a part that is held as codes");
    let (stored, minimums) = (coding.num_groups(cols), if coding.affine { coding.num_groups(cols) } else { 0 });
    let (mut scales, mut least) = (vec![0.0; stored], vec![0.0; minimums]);
    row.codes.resize(cols, 0);
    part.read_codes(index, &mut row.codes, &mut scales, &mut least);
    if let Levels::Five { .. } | Levels::Six { .. } = coding.levels {
        row.codes.iter_mut().for_each(|code| *code = coding.levels.level(*code) as u8);
    }
    row.scales.extend((0..groups).map(|group| scales[group * coded.group / coding.group]));
    if coding.affine {
        row.minimums.extend((0..groups).map(|group| least[group * coded.group / coding.group]));
    }
}

/// All matrices one after the other, as plain values; they have one width.
pub(super) fn load_plain(loader: &mut Loader, matrices: &[Matrix<'_>], float: Float) -> Result<Buffer> {
    let cols = matrices.first().map_or(0, Matrix::cols);
    // Every part with the number of its first row among all.
    let mut parts = Vec::new();
    let mut rows = 0;
    for part in matrices.iter().flat_map(Matrix::parts).filter(|part| part.num_rows() > 0) {
        Error::check("inputs of an expert", cols, part.cols())?;
        parts.push((rows, part));
        rows += part.num_rows();
    }
    let buffer = loader.device().alloc("weights", rows * cols * float.bytes())?;
    let target = Target { buffer: &buffer, offset: 0, unit_bytes: cols * float.bytes() };
    loader.load(rows, [target], |row, [values]| {
        let (first, part) = parts[parts.partition_point(|(first, _)| *first <= row) - 1];
        plain::read_row(part, row - first, float, values);
    })?;
    Ok(buffer)
}

fn float_of(precision: Precision) -> Float {
    match precision {
        Precision::BF16 => Float::Bf16,
        Precision::F32 => Float::F32,
    }
}

/// Bytes that a matrix will take. `form`: its form if its values are generated.
pub fn packed_bytes(matrix: &Matrix<'_>, precision: Precision, form: RandomForm) -> u64 {
    Plan::of_random(matrix, float_of(precision), form).iter().map(|plan| plan.layout().bytes as u64).sum()
}

/// Whether all of a matrix's values will be plain, in one run.
pub fn is_plain(matrix: &Matrix<'_>, precision: Precision, form: RandomForm) -> bool {
    matches!(Plan::of_random(matrix, float_of(precision), form)[..], [Plan { form: Form::Plain(_), .. }])
}

/// Bytes that a layer's experts will take, biases included.
pub fn packed_experts_bytes(source: &ExpertsSource<'_>, precision: Precision) -> u64 {
    let value = float_of(precision).bytes();
    let matrices = source.gate_up.iter().chain(&source.down);
    let values: usize = matrices.map(|matrix| matrix.num_rows() * matrix.cols()).sum();
    let biases = source.gate_up_bias.iter().chain(&source.down_bias).flatten();
    (values * value) as u64 + biases.map(|bias| 4 * bias.len() as u64).sum::<u64>()
}
