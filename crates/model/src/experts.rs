//! The experts of one layer, from any of five checkpoint layouts.

use std::borrow::Cow;

use folio_device::ExpertsSource;
use folio_formats::{Format, Matrix, TensorView};

use crate::{
    Error, ExpertsSpec, Names, Result,
    load::{Loader, Place},
};

/// Sizes for reading all layouts.
struct Shape {
    experts: usize,
    inter: usize,
    hidden: usize,
    bias: bool,
}

pub(crate) fn source<'a>(
    loader: &Loader<'a>,
    place: Place,
    spec: &ExpertsSpec,
    hidden: usize,
) -> Result<ExpertsSource<'a>> {
    let shape = Shape { experts: spec.experts, inter: spec.inter, hidden, bias: spec.expert_bias };
    let mut source = stored(loader, place, &shape)?;
    for matrix in source.gate_up.iter_mut().chain(&mut source.down) {
        *matrix = loader.at_load(matrix.clone())?;
    }
    Ok(source)
}

/// The experts in their stored form.
fn stored<'a>(loader: &Loader<'a>, place: Place, shape: &Shape) -> Result<ExpertsSource<'a>> {
    let prefix = loader.names().layer_prefix(place.layer);
    match loader.names() {
        Names::Gguf { .. } if loader.exists(&format!("{prefix}ffn_down_exps.weight")) => {
            gguf_fused(loader, &prefix, shape)
        }
        Names::Gguf { .. } => one_by_one(loader, &prefix, shape, &GGUF_SINGLE),
        Names::HuggingFace { interleaved_experts, .. } => {
            let fused = format!("{prefix}mlp.experts.gate_up_proj");
            if loader.exists(&format!("{fused}_blocks")) {
                mxfp4(loader, &prefix, shape)
            } else if *interleaved_experts {
                interleaved(loader, &prefix, shape)
            } else if loader.exists(&fused) {
                fused_rows(loader, &prefix, shape)
            } else if loader.has_matrix(&format!("{prefix}block_sparse_moe.experts.0.w1")) {
                one_by_one(loader, &prefix, shape, &MIXTRAL_SINGLE)
            } else {
                one_by_one(loader, &prefix, shape, &SINGLE)
            }
        }
    }
}

/// Names of one expert's matrices; `#` stands for its number.
struct SingleNames {
    gate: &'static str,
    up: &'static str,
    down: &'static str,
}

const SINGLE: SingleNames =
    SingleNames { gate: "mlp.experts.#.gate_proj", up: "mlp.experts.#.up_proj", down: "mlp.experts.#.down_proj" };
const MIXTRAL_SINGLE: SingleNames = SingleNames {
    gate: "block_sparse_moe.experts.#.w1",
    up: "block_sparse_moe.experts.#.w3",
    down: "block_sparse_moe.experts.#.w2",
};
const GGUF_SINGLE: SingleNames = SingleNames { gate: "ffn_gate.#", up: "ffn_up.#", down: "ffn_down.#" };

/// The matrices of one expert, without a suffix.
pub(crate) struct ExpertStems {
    pub gate: String,
    pub up: String,
    pub down: String,
}

/// Names of each expert's matrices; `None` if all experts are in one tensor.
pub(crate) fn stems(loader: &Loader<'_>, place: Place, experts: usize) -> Option<Vec<ExpertStems>> {
    let prefix = loader.names().layer_prefix(place.layer);
    let found = [&SINGLE, &MIXTRAL_SINGLE, &GGUF_SINGLE]
        .into_iter()
        .find(|names| loader.has_matrix(&format!("{prefix}{}", names.gate.replace('#', "0"))))?;
    let stem = |pattern: &str, expert: usize| format!("{prefix}{}", pattern.replace('#', &expert.to_string()));
    let of = |expert| ExpertStems {
        gate: stem(found.gate, expert),
        up: stem(found.up, expert),
        down: stem(found.down, expert),
    };
    Some((0..experts).map(of).collect())
}

fn one_by_one<'a>(loader: &Loader<'a>, prefix: &str, shape: &Shape, names: &SingleNames) -> Result<ExpertsSource<'a>> {
    let Shape { experts, inter, hidden, bias } = *shape;
    let mut source = ExpertsSource { gate_up: Vec::new(), down: Vec::new(), gate_up_bias: None, down_bias: None };
    let (mut gate_up_bias, mut down_bias) = (Vec::new(), Vec::new());
    for expert in 0..experts {
        let name = |pattern: &str, suffix| format!("{prefix}{}{suffix}", pattern.replace('#', &expert.to_string()));
        let read = |pattern, rows, cols| loader.matrix_named(&name(pattern, ""), rows, cols);
        let gate = read(names.gate, inter, hidden)?;
        let up = read(names.up, inter, hidden)?;
        source.gate_up.push(Matrix::stack(vec![gate, up])?);
        source.down.push(read(names.down, hidden, inter)?);
        if bias {
            let mut values = loader.values_named(&name(names.gate, ".bias"), &[inter])?;
            values.extend(loader.values_named(&name(names.up, ".bias"), &[inter])?);
            gate_up_bias.push(values);
            down_bias.push(loader.values_named(&name(names.down, ".bias"), &[hidden])?);
        }
    }
    if bias {
        (source.gate_up_bias, source.down_bias) = (Some(gate_up_bias), Some(down_bias));
    }
    Ok(source)
}

/// `[experts, 2 * inter, hidden]`, gate rows above up rows.
fn fused_rows<'a>(loader: &Loader<'a>, prefix: &str, shape: &Shape) -> Result<ExpertsSource<'a>> {
    let Shape { experts, inter, hidden, .. } = *shape;
    let gate_up = loader.named(&format!("{prefix}mlp.experts.gate_up_proj"), &[experts, 2 * inter, hidden])?;
    let down = loader.named(&format!("{prefix}mlp.experts.down_proj"), &[experts, hidden, inter])?;
    let (gate_up_bias, down_bias) = biases(loader, prefix, shape, false)?;
    Ok(ExpertsSource {
        gate_up: per_expert(&loader.matrix_of(&gate_up)?, experts),
        down: per_expert(&loader.matrix_of(&down)?, experts),
        gate_up_bias,
        down_bias,
    })
}

/// `[experts, hidden, 2 * inter]`: transposed, with alternating gate and up columns.
fn interleaved<'a>(loader: &Loader<'a>, prefix: &str, shape: &Shape) -> Result<ExpertsSource<'a>> {
    let Shape { experts, inter, hidden, .. } = *shape;
    let gate_up = loader.named(&format!("{prefix}mlp.experts.gate_up_proj"), &[experts, hidden, 2 * inter])?;
    let down = loader.named(&format!("{prefix}mlp.experts.down_proj"), &[experts, inter, hidden])?;
    let (gate_up_bias, down_bias) = biases(loader, prefix, shape, true)?;
    let turned = |matrix: Matrix<'a>| per_expert(&matrix, experts).into_iter().map(|m| transpose(&m));
    let gate_up = turned(loader.matrix_of(&gate_up)?).map(|m| Ok(m?.pick_rows(even_then_odd(inter))));
    Ok(ExpertsSource {
        gate_up: gate_up.collect::<Result<_>>()?,
        down: turned(loader.matrix_of(&down)?).collect::<Result<_>>()?,
        gate_up_bias,
        down_bias,
    })
}

/// `[experts, rows, blocks, 16]` nibble pairs and `[experts, rows, blocks]` scales, with
/// alternating gate and up rows.
fn mxfp4<'a>(loader: &Loader<'a>, prefix: &str, shape: &Shape) -> Result<ExpertsSource<'a>> {
    let Shape { experts, inter, hidden, .. } = *shape;
    let (gate_up_bias, down_bias) = biases(loader, prefix, shape, true)?;
    let gate_up = mxfp4_rows(loader, &format!("{prefix}mlp.experts.gate_up_proj"), [experts, 2 * inter, hidden])?;
    let down = mxfp4_rows(loader, &format!("{prefix}mlp.experts.down_proj"), [experts, hidden, inter])?;
    let gate_up = per_expert(&gate_up, experts).into_iter().map(|m| m.pick_rows(even_then_odd(inter)));
    Ok(ExpertsSource { gate_up: gate_up.collect(), down: per_expert(&down, experts), gate_up_bias, down_bias })
}

fn mxfp4_rows<'a>(loader: &Loader<'a>, name: &str, shape: [usize; 3]) -> Result<Matrix<'a>> {
    let [experts, rows, cols] = shape;
    let blocks_a_row = cols / 32;
    let blocks = loader.named(&format!("{name}_blocks"), &[experts, rows, blocks_a_row, 16])?;
    let scales = loader.named(&format!("{name}_scales"), &[experts, rows, blocks_a_row])?;
    for view in [&blocks, &scales] {
        check_bytes(loader, view)?;
    }
    if cols % 32 != 0 || blocks_a_row == 0 {
        let (name, expected) = (name.to_owned(), vec![experts, rows, cols.next_multiple_of(32)]);
        return Err(Error::TensorShape { name, family: loader.family(), expected, found: shape.to_vec() });
    }
    let packed_rows = blocks.bytes.chunks_exact(16 * blocks_a_row).zip(scales.bytes.chunks_exact(blocks_a_row));
    let packed = packed_rows.map(|(blocks, scales)| {
        let row = blocks.chunks_exact(16).zip(scales).flat_map(|(block, scale)| mxfp4_block(*scale, block));
        Cow::Owned(row.collect())
    });
    Ok(Matrix::from_rows(Format::MXFP4, cols, packed.collect())?)
}

fn check_bytes(loader: &Loader<'_>, view: &TensorView<'_>) -> Result<()> {
    if matches!(view.format, Format::U8 | Format::I8) {
        return Ok(());
    }
    let (name, found) = (view.name.to_owned(), format!("{:?}", view.format));
    Err(Error::TensorFormat { name, family: loader.family(), expected: "bytes", found })
}

/// Converts nibbles from neighbours per byte to halves per byte: byte `i` holds values `i` (low)
/// and `i + 16` (high), after the scale.
fn mxfp4_block(scale: u8, neighbours: &[u8]) -> [u8; 17] {
    let value = |index: usize| neighbours[index / 2] >> (4 * (index % 2)) & 0x0f;
    std::array::from_fn(|at| match at {
        0 => scale,
        _ => value(at - 1) | value(at - 1 + 16) << 4,
    })
}

/// Fused GGUF experts: `ffn_gate_exps` and `ffn_up_exps`, or both as `ffn_gate_up_exps`.
fn gguf_fused<'a>(loader: &Loader<'a>, prefix: &str, shape: &Shape) -> Result<ExpertsSource<'a>> {
    let Shape { experts, inter, hidden, bias } = *shape;
    let read = |name: &str, rows, cols| {
        let view = loader.named(&format!("{prefix}{name}.weight"), &[experts, rows, cols])?;
        Ok::<_, Error>(per_expert(&loader.matrix_of(&view)?, experts))
    };
    let gate_up = match loader.exists(&format!("{prefix}ffn_gate_up_exps.weight")) {
        true => read("ffn_gate_up_exps", 2 * inter, hidden)?,
        false => {
            let pairs = read("ffn_gate_exps", inter, hidden)?.into_iter().zip(read("ffn_up_exps", inter, hidden)?);
            pairs.map(|(gate, up)| Ok(Matrix::stack(vec![gate, up])?)).collect::<Result<_>>()?
        }
    };
    let (mut gate_up_bias, mut down_bias) = (None, None);
    if bias {
        let values = |name: &str, len| loader.values_named(&format!("{prefix}{name}.bias"), &[experts, len]);
        let (gate, up) = (values("ffn_gate_exps", inter)?, values("ffn_up_exps", inter)?);
        let pairs = gate.chunks_exact(inter).zip(up.chunks_exact(inter));
        gate_up_bias = Some(pairs.map(|(gate, up)| [gate, up].concat()).collect());
        down_bias = Some(values("ffn_down_exps", hidden)?.chunks_exact(hidden).map(<[f32]>::to_vec).collect());
    }
    Ok(ExpertsSource { gate_up, down: read("ffn_down_exps", hidden, inter)?, gate_up_bias, down_bias })
}

/// One bias vector per expert.
type ExpertBiases = Option<Vec<Vec<f32>>>;

fn biases(loader: &Loader<'_>, prefix: &str, shape: &Shape, turns: bool) -> Result<(ExpertBiases, ExpertBiases)> {
    let Shape { experts, inter, hidden, bias } = *shape;
    if !bias {
        return Ok((None, None));
    }
    let gate_up = loader.values_named(&format!("{prefix}mlp.experts.gate_up_proj_bias"), &[experts, 2 * inter])?;
    let down = loader.values_named(&format!("{prefix}mlp.experts.down_proj_bias"), &[experts, hidden])?;
    let ordered = |row: &[f32]| match turns {
        true => even_then_odd(inter).map(|at| row[at]).collect(),
        false => row.to_vec(),
    };
    let gate_up = gate_up.chunks_exact(2 * inter).map(ordered).collect();
    Ok((Some(gate_up), Some(down.chunks_exact(hidden).map(<[f32]>::to_vec).collect())))
}

fn even_then_odd(half: usize) -> impl Iterator<Item = usize> {
    (0..half).map(|i| 2 * i).chain((0..half).map(|i| 2 * i + 1))
}

fn per_expert<'a>(all: &Matrix<'a>, experts: usize) -> Vec<Matrix<'a>> {
    let rows = all.num_rows() / experts;
    (0..experts).map(|expert| all.slice_rows(expert * rows..(expert + 1) * rows)).collect()
}

/// Transposes plain formats byte by byte, so that they keep their size; block formats are decoded.
fn transpose<'a>(matrix: &Matrix<'a>) -> Result<Matrix<'a>> {
    let (format, size) = match matrix.format() {
        Some(format @ Format::F32) => (format, 4),
        Some(format @ (Format::F16 | Format::BF16)) => (format, 2),
        _ => return Ok(matrix.transpose()),
    };
    let source = &matrix.parts()[0];
    let rows = matrix.num_rows();
    let mut turned = vec![vec![0u8; rows * size]; matrix.cols()];
    for row in 0..rows {
        for (col, value) in source.row(row).chunks_exact(size).enumerate() {
            turned[col][row * size..][..size].copy_from_slice(value);
        }
    }
    Ok(Matrix::from_rows(format, rows, turned.into_iter().map(Cow::Owned).collect())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mxfp4_neighbours_become_halves() {
        // Value i is i % 16: neighbours (0, 1), (2, 3), ... share a byte, low nibble first.
        let neighbours: Vec<u8> = (0..16).map(|i| (2 * i % 16) | ((2 * i + 1) % 16) << 4).collect();
        let block = mxfp4_block(200, &neighbours);
        assert_eq!(block[0], 200);
        for (at, byte) in block[1..].iter().enumerate() {
            assert_eq!((byte & 15, byte >> 4), (at as u8 % 16, (at as u8 + 16) % 16));
        }
    }

    #[test]
    fn plain_transpose_keeps_the_format() {
        let rows = [[1u8, 0, 2, 0, 3, 0], [4, 0, 5, 0, 6, 0]];
        let rows = rows.iter().map(|row| Cow::Owned(row.to_vec())).collect();
        let turned = transpose(&Matrix::from_rows(Format::BF16, 3, rows).unwrap()).unwrap();
        assert_eq!((turned.format(), turned.num_rows(), turned.cols()), (Some(Format::BF16), 3, 2));
        assert_eq!(turned.parts()[0].row(1), [2, 0, 5, 0]);
    }
}
