//! Matrix products against this machine's peaks, measured in turn so that both see the same
//! conditions: `cargo run --release -p folio-device --example matmul [threads] [rounds]
//! [names...]`.
//!
//! One row is compared by the bytes of weights it reads per second, over a set of weights much
//! larger than any cache; more rows by their operations per second against the peak of the
//! instructions they use. The best of all rounds counts on both sides.

use std::borrow::Cow;
use std::time::Instant;

use folio_device::cpu::{Cpu, CpuConfig, Weight, ceilings};
use folio_device::{Memory, Operations, TensorKind};
use folio_formats::{ActivationScale, Format, Grouped, GroupedLevels, GroupedRow, Matrix};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Matrices of a 1B-parameter decoder: output, down, and gate and up of two sizes.
const SHAPES: [(usize, usize); 4] = [(2048, 2048), (8192, 2048), (2048, 8192), (16384, 2048)];
/// Bytes of weights that a small batch reads in turn; a large one passes over one layer only.
const SET_BYTES: u64 = 400 << 20;
const ROWS: [usize; 5] = [1, 4, 16, 64, 512];

/// A storage format to be measured.
#[derive(Clone, Copy)]
struct Form {
    name: &'static str,
    matrix: fn(usize, usize) -> Result<Matrix<'static>>,
}

const FORMS: [Form; 12] = [
    Form { name: "bf16", matrix: |rows, cols| blocks(Format::BF16, rows, cols) },
    Form { name: "8-bit g32", matrix: |rows, cols| blocks(Format::Q8_0, rows, cols) },
    Form { name: "8-bit g128", matrix: |rows, cols| grouped(GroupedLevels::Signed8, 128, false, rows, cols) },
    Form { name: "8-bit g256", matrix: |rows, cols| grouped(GroupedLevels::Signed8, 256, false, rows, cols) },
    Form { name: "4-bit g32", matrix: |rows, cols| blocks(Format::Q4_0, rows, cols) },
    Form { name: "4-bit g32 min", matrix: |rows, cols| blocks(Format::Q4_1, rows, cols) },
    Form { name: "4-bit K", matrix: |rows, cols| blocks(Format::Q4_K, rows, cols) },
    Form { name: "4-bit g128", matrix: |rows, cols| grouped(GroupedLevels::UNSIGNED4, 128, true, rows, cols) },
    Form { name: "4-bit table g32", matrix: |rows, cols| blocks(Format::MXFP4, rows, cols) },
    Form { name: "5-bit g32", matrix: |rows, cols| blocks(Format::Q5_0, rows, cols) },
    Form { name: "5-bit K", matrix: |rows, cols| blocks(Format::Q5_K, rows, cols) },
    Form { name: "6-bit K", matrix: |rows, cols| blocks(Format::Q6_K, rows, cols) },
];

/// All rows have the bytes of one.
fn blocks(format: Format, rows: usize, cols: usize) -> Result<Matrix<'static>> {
    let values: Vec<f32> = (0..cols).map(|i| ((i * 37) % 255) as f32 / 100.0 - 1.27).collect();
    let row: &'static [u8] = match format {
        Format::BF16 => values.iter().flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect::<Vec<_>>(),
        _ => {
            let block: Vec<u8> =
                (0..format.block_bytes()).map(|i| if i < 2 { 0x3c - i as u8 } else { (37 * i) as u8 }).collect();
            block.repeat(cols / format.block_len())
        }
    }
    .leak();
    Ok(Matrix::from_rows(format, cols, vec![Cow::Borrowed(row); rows])?)
}

fn grouped(levels: GroupedLevels, group: usize, affine: bool, rows: usize, cols: usize) -> Result<Matrix<'static>> {
    let most = if levels == GroupedLevels::Signed8 { 255 } else { 16 };
    let codes: &'static [u8] = (0..cols).map(|i| (i * 37 % most) as u8).collect::<Vec<_>>().leak();
    let groups = cols.div_ceil(group);
    let row = GroupedRow {
        codes: Cow::Borrowed(codes),
        scales: vec![0.01; groups],
        minimums: vec![-0.08; if affine { groups } else { 0 }],
        outliers: Vec::new(),
    };
    let form = Grouped { group, levels, activations: ActivationScale::Row, order: None, outliers: None };
    Ok(Matrix::from_grouped(cols, form, vec![row; rows])?)
}

/// A format's weights and the best times so far.
struct Subject {
    form: Form,
    layers: Vec<Vec<Weight>>,
    bytes: u64,
    /// By number of rows: seconds of a pass, and of each shape.
    best: [(f64, [f64; SHAPES.len()]); ROWS.len()],
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(2), |arg| arg.parse())?;
    let rounds = args.next().map_or(Ok(5), |arg| arg.parse())?;
    let names: Vec<String> = args.collect();
    let mut cpu = Cpu::new(CpuConfig { threads, isa: None })?;
    let wanted = FORMS.into_iter().filter(|form| names.is_empty() || names.iter().any(|name| name == form.name));
    let mut subjects = wanted.map(|form| load(&mut cpu, form)).collect::<Result<Vec<_>>>()?;
    let reader = ceilings::Reader::new(threads, 1 << 30)?;
    let (mut bandwidth, mut bf16_peak, mut int8_peak) = (0.0f64, 0.0f64, 0.0f64);
    for _ in 0..rounds {
        for subject in &mut subjects {
            for (index, rows) in ROWS.into_iter().enumerate() {
                bandwidth = bandwidth.max(reader.pass());
                bf16_peak = bf16_peak.max(ceilings::bf16_peak(threads));
                int8_peak = int8_peak.max(ceilings::int8_peak(threads));
                measure(&mut cpu, subject, index, rows)?;
            }
        }
    }
    println!(
        "{threads} threads: read {:.1} GB/s, bf16 {:.0} GFLOP/s, int8 {:.0} GOP/s",
        bandwidth / 1e9,
        bf16_peak / 1e9,
        int8_peak / 1e9
    );
    println!(
        "{:16} {:>5} {:>7} {:>8} {:>8} {:>8}   by shape, of read or of peak",
        "", "rows", "GB/s", "of read", "GOP/s", "of peak"
    );
    for subject in &subjects {
        let peak = if subject.form.name == "bf16" { bf16_peak } else { int8_peak };
        for (rows, (seconds, by_shape)) in ROWS.into_iter().zip(subject.best) {
            let values: usize = SHAPES.iter().map(|(outputs, inputs)| outputs * inputs).sum();
            let read = subject.bytes as f64 / subject.layers.len() as f64 / seconds;
            let operations = (2 * values * rows) as f64 / seconds;
            let shapes = SHAPES.iter().zip(by_shape).map(|(&(outputs, inputs), seconds)| {
                let share = (outputs * inputs) as f64 / values as f64;
                let part = match rows {
                    1 => subject.bytes as f64 / subject.layers.len() as f64 * share / seconds / bandwidth,
                    _ => (2 * outputs * inputs * rows) as f64 / seconds / peak,
                };
                format!("{:.0}%", 100.0 * part)
            });
            println!(
                "{:16} {rows:5} {:7.1} {:7.1}% {:8.0} {:7.1}%   {}",
                subject.form.name,
                read / 1e9,
                100.0 * read / bandwidth,
                operations / 1e9,
                100.0 * operations / peak,
                shapes.collect::<Vec<_>>().join(" ")
            );
        }
    }
    Ok(())
}

fn load(cpu: &mut Cpu, form: Form) -> Result<Subject> {
    let started = Instant::now();
    let mut layers = Vec::new();
    let mut bytes = 0;
    while bytes < SET_BYTES {
        let pack = |&(outputs, inputs): &(usize, usize)| Ok(cpu.weight(&(form.matrix)(outputs, inputs)?)?);
        let layer: Vec<Weight> = SHAPES.iter().map(pack).collect::<Result<_>>()?;
        bytes += layer.iter().map(|weight| cpu.weight_bytes(weight)).sum::<u64>();
        layers.push(layer);
    }
    println!("{}: packed {:.2} GB in {:.2} s", form.name, bytes as f64 / 1e9, started.elapsed().as_secs_f64());
    Ok(Subject { form, layers, bytes, best: [(f64::MAX, [f64::MAX; SHAPES.len()]); ROWS.len()] })
}

fn measure(cpu: &mut Cpu, subject: &mut Subject, index: usize, rows: usize) -> Result<()> {
    let layers = if rows > 16 { &subject.layers[..1] } else { &subject.layers[..] };
    let mut sums = [0.0; SHAPES.len()];
    let mut tensors = Vec::new();
    for (weight, (outputs, inputs)) in layers[0].iter().zip(SHAPES) {
        let kind = TensorKind::Activation;
        let (mut out, mut x) = (cpu.tensor(rows, outputs, kind)?, cpu.tensor(rows, inputs, kind)?);
        x.head_mut(rows).iter_mut().enumerate().for_each(|(i, value)| *value = (i * 31 % 201) as f32 / 100.0 - 1.0);
        // Touches the tensors before the clock starts.
        cpu.linear(&mut out, &x, weight, None, rows);
        tensors.push((out, x));
    }
    for layer in layers {
        for (index, weight) in layer.iter().enumerate() {
            let (out, x) = &mut tensors[index];
            let start = Instant::now();
            cpu.linear(out, x, weight, None, rows);
            sums[index] += start.elapsed().as_secs_f64() / layers.len() as f64;
        }
    }
    let (total, by_shape) = &mut subject.best[index];
    *total = total.min(sums.iter().sum());
    for (best, sum) in by_shape.iter_mut().zip(sums) {
        *best = best.min(sum);
    }
    Ok(())
}
