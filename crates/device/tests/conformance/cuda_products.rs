//! Products of one row to a thousand on a CUDA device, with every form of weights there: both
//! decide which kernel runs. Without a device these tests are skipped.

use std::collections::HashMap;

use folio_device::cuda::{Cuda, CudaConfig};
use folio_device::{Activation, Handles, Memory, Operations, Product, Steps, TensorKind};
use folio_formats::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix};

use crate::cuda::open;
use crate::data::{Random, deviation, download, matrix, round_to_bf16, tensor};
use crate::{close, same};

const COUNTS: [usize; 12] = [1, 5, 8, 17, 40, 64, 100, 130, 256, 300, 700, 1024];

/// One weight, and the largest error of its products.
struct Case {
    name: &'static str,
    matrix: Matrix<'static>,
    bias: bool,
    tolerance: f32,
}

fn cases() -> Vec<Case> {
    let plain = |rows, cols| matrix(Format::BF16, rows, cols, 21);
    let coded = |levels, group, affine| grouped(levels, group, affine, 1, 456, 640);
    let float8 = |group, shared, rows| grouped(GroupedLevels::Float8, group, false, shared, rows, 640);
    // For eight-bit floats x is rounded to them too.
    let rounded = 1.0 / 12.0;
    let case = |name, matrix, bias, tolerance| Case { name, matrix, bias, tolerance };
    let blocks = || Matrix::stack(vec![float8(128, 128, 256), float8(128, 128, 128), float8(128, 128, 72)]).unwrap();
    let unlike = || Matrix::stack(vec![float8(128, 128, 72), float8(128, 128, 136)]).unwrap();
    vec![
        case("bf16, slices of k", plain(4096, 1088), true, 1.0 / 128.0),
        case("bf16, one slice", plain(8448, 200), false, 1.0 / 128.0),
        case("bf16, rows that no copy engine takes", plain(333, 640), true, 1.0 / 128.0),
        case("fp8, a scale a row", float8(640, 1, 456), true, rounded),
        case("fp8, blocks of three parts", blocks(), false, rounded),
        case("fp8, blocks of parts that do not join", unlike(), true, rounded),
        case("int8 in groups of 128", coded(GroupedLevels::Signed8, 128, false), true, 1.0 / 100.0),
        case("int8 with minimums", coded(GroupedLevels::Signed8, 32, true), false, 1.0 / 100.0),
        case("int4 in groups of 128", coded(GroupedLevels::UNSIGNED4, 128, false), false, 1.0 / 100.0),
        case("int4 in groups of 32 with minimums", coded(GroupedLevels::UNSIGNED4, 32, true), true, 1.0 / 100.0),
        case("int4 in groups of 16", coded(GroupedLevels::UNSIGNED4, 16, false), false, 1.0 / 100.0),
        case("fp4", coded(GroupedLevels::E2M1, 32, false), true, 1.0 / 100.0),
    ]
}

/// Codes; `shared` neighbouring rows have the same scales.
fn grouped(
    levels: GroupedLevels,
    group: usize,
    affine: bool,
    shared: usize,
    rows: usize,
    cols: usize,
) -> Matrix<'static> {
    let mut random = Random::new((group + rows) as u64);
    let (groups, is_float8) = (cols.div_ceil(group), levels == GroupedLevels::Float8);
    let mut scales = Vec::new();
    let rows = (0..rows).map(|row| {
        if row % shared == 0 {
            scales = (0..groups).map(|_| 0.1 * (1.0 + 0.3 * random.value().abs())).collect();
        }
        GroupedRow {
            codes: (0..cols)
                .map(|_| match levels {
                    GroupedLevels::Signed8 => random.below(256) as u8,
                    // Numbers of about one.
                    GroupedLevels::Float8 => ((40 + random.below(32)) | (random.below(2) << 7)) as u8,
                    _ => random.below(16) as u8,
                })
                .collect(),
            scales: scales.clone(),
            minimums: (0..if affine { groups } else { 0 }).map(|_| random.value() - 1.0).collect(),
            outliers: Vec::new(),
        }
    });
    let rows = rows.collect();
    let activations = if is_float8 { ActivationScale::Row } else { ActivationScale::Group };
    Matrix::from_grouped(cols, Grouped { group, levels, activations, order: None, outliers: None }, rows).unwrap()
}

fn row(number: usize, cols: usize) -> Vec<f32> {
    let mut values = Random::new(7000 + number as u64).values(cols);
    round_to_bf16(&mut values);
    values
}

/// The product of the given rows.
fn multiply(
    backend: &mut Cuda,
    weight: &<Cuda as Handles>::Weight,
    bias: &[f32],
    cols: usize,
    numbers: &[usize],
) -> Vec<f32> {
    let values: Vec<f32> = numbers.iter().flat_map(|&number| row(number, cols)).collect();
    let x = tensor(backend, cols, &values, TensorKind::Activation);
    let (rows, outputs) = (numbers.len(), bias.len());
    let vector = backend.vector(bias).unwrap();
    // One row more than requested: it must not change.
    let mut out = tensor(backend, outputs, &vec![5.0; (rows + 1) * outputs], TensorKind::Activation);
    let bias = bias.iter().any(|&value| value != 0.0).then_some(&vector);
    backend.linear(&mut out, &x, weight, bias, rows);
    let mut out = download(backend, &out, rows + 1);
    assert!(out.split_off(rows * outputs).iter().all(|&value| value == 5.0), "wrote beyond its rows");
    out
}

fn expected(matrix: &Matrix<'_>, bias: &[f32], number: usize) -> Vec<f32> {
    let (x, mut weight) = (row(number, matrix.cols()), vec![0.0; matrix.cols()]);
    let product = |(output, bias): (usize, &f32)| {
        matrix.read_row(output, &mut weight);
        let terms = x.iter().zip(&weight).map(|(&x, &w)| f64::from(x) * f64::from(w));
        (terms.sum::<f64>() + f64::from(*bias)) as f32
    };
    bias.iter().enumerate().map(product).collect()
}

fn check(backend: &mut Cuda, case: &Case, invariant: bool) -> Result<(), String> {
    let (outputs, cols) = (case.matrix.num_rows(), case.matrix.cols());
    let weight = backend.weight(&case.matrix).map_err(|error| error.to_string())?;
    let bias = if case.bias { Random::new(3).values(outputs) } else { vec![0.0; outputs] };
    let floor = (cols as f32).sqrt() * deviation(&case.matrix);
    let mut known: HashMap<usize, Vec<f32>> = HashMap::new();
    for count in COUNTS {
        let numbers: Vec<usize> = (0..count).collect();
        let found = multiply(backend, &weight, &bias, cols, &numbers);
        backend.check().map_err(|error| format!("{count} rows: {error}"))?;
        for number in [0, 7, 129, count / 2, count - 1].into_iter().filter(|&number| number < count) {
            let found = &found[number * outputs..(number + 1) * outputs];
            let expected = known.entry(number).or_insert_with(|| expected(&case.matrix, &bias, number));
            let told = |why: String| format!("row {number} of {count}: {why}");
            close(found, expected, outputs, case.tolerance, floor).map_err(told)?;
            if invariant {
                let alone = multiply(backend, &weight, &bias, cols, &[number]);
                same(found, &alone, outputs).map_err(|why| format!("row {number} of {count} and alone: {why}"))?;
            }
        }
    }
    Ok(())
}

fn products(name: &str, config: CudaConfig) {
    let invariant = config.batch_invariant;
    let Some(mut backend) = open(config) else { return };
    let failures: Vec<String> = cases()
        .iter()
        .filter_map(|case| check(&mut backend, case, invariant).err().map(|why| format!("{}: {why}", case.name)))
        .collect();
    failures.iter().for_each(|failure| println!("{name}: {failure}"));
    assert!(failures.is_empty(), "{name}: {} of {} weights failed", failures.len(), cases().len());
}

#[test]
fn cuda_products_of_any_number_of_rows() {
    products("bf16", CudaConfig::default());
}

#[test]
fn cuda_products_of_any_number_of_rows_without_cublas() {
    products("bf16 without cuBLASLt", CudaConfig { use_cublas: false, ..CudaConfig::default() });
}

#[test]
fn cuda_products_do_not_see_how_many_rows_there_are() {
    products("bf16 batch-invariant", CudaConfig { batch_invariant: true, ..CudaConfig::default() });
}

/// Gated products equal a product followed by a gate, bit for bit, whether or not the product
/// kernel gates.
#[test]
fn cuda_gated_products_are_the_product_and_then_the_gate() {
    let config = CudaConfig { batch_invariant: true, ..CudaConfig::default() };
    let Some(mut backend) = open(config) else { return };
    let hopper = backend.device().info().capability == (9, 0);
    let activations = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::SwigluClamped { alpha: 1.702, limit: 0.5 },
        Activation::Gelu,
    ];
    // Two boxes of weight rows per block, four, three, which are no pairs if they are taken
    // together; half a pair, slices.
    let shapes = [(16896, 200), (28672, 136), (25344, 72), (16832, 72), (512, 1088)];
    for (number, (outputs, cols)) in shapes.into_iter().enumerate() {
        let weight = matrix(Format::BF16, outputs, cols, 21);
        let unit = 1.0 / ((cols as f32).sqrt() * deviation(&weight));
        let weight = backend.weight(&weight).unwrap();
        let bias = backend.vector(&Random::new(3).values(outputs)).unwrap();
        for (index, rows) in [1, 8, 16, 33, 64, 77, 80, 96, 130].into_iter().enumerate() {
            let activation = activations[(number + index) % 4];
            let values: Vec<f32> = (0..rows).flat_map(|number| row(number, cols)).map(|value| value * unit).collect();
            let x = tensor(&mut backend, cols, &values, TensorKind::Activation);
            let mut room =
                |cols: usize| tensor(&mut backend, cols, &vec![5.0; (rows + 1) * cols], TensorKind::Activation);
            let (mut gate_up, mut gated, mut parts) = (room(outputs), room(outputs / 2), room(outputs / 2));
            let product = Product { weight: &weight, bias: (index % 2 == 0).then_some(&bias) };
            backend.linear_gated(&mut gated, &mut gate_up, &x, product, activation, rows);
            let paired = [9..=96, 9..=96, 33..=96].get(number).is_some_and(|counts| counts.contains(&rows));
            let at_once = hopper && paired && activation != Activation::Gelu;
            let untouched = download(&mut backend, &gate_up, rows).iter().all(|&value| value == 5.0);
            assert_eq!(at_once, untouched, "[{outputs}, {cols}], {rows} rows, {activation:?}");
            backend.linear(&mut gate_up, &x, &weight, (index % 2 == 0).then_some(&bias), rows);
            backend.gate(&mut parts, &gate_up, activation, rows);
            let [gated, parts] = [gated, parts].map(|tensor| download(&mut backend, &tensor, rows + 1));
            same(&gated, &parts, outputs / 2)
                .unwrap_or_else(|why| panic!("[{outputs}, {cols}], {rows} rows, {activation:?}: {why}"));
        }
    }
}
