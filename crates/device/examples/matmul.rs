//! Matrix products against this machine's ceilings, measured in turn so that both see the same conditions:
//! `cargo run --release -p folio-device --example matmul [threads] [rounds]`.
//!
//! One row is judged by the bytes of weights it reads a second, over a set of weights much larger than any cache;
//! more rows by their operations a second against the bf16 peak. The best of all rounds counts on both sides.

use std::borrow::Cow;
use std::time::Instant;

use folio_device::Backend;
use folio_device::cpu::{Cpu, CpuConfig, Weight, ceilings};
use folio_formats::{Format, Matrix};

/// One layer of a 1B-parameter decoder (qkv, output, gate and up, down), and how many of them are read in turn.
const SHAPES: [(usize, usize); 4] = [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)];
const LAYERS: usize = 16;
const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 64, 512];

struct Best {
    rows: usize,
    seconds: f64,
    by_shape: [f64; SHAPES.len()],
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let threads = args.next().map_or(Ok(2), |arg| arg.parse())?;
    let rounds = args.next().map_or(Ok(5), |arg| arg.parse())?;
    let mut cpu = Cpu::new(CpuConfig { threads, isa: None })?;
    let started = Instant::now();
    let layers = (0..LAYERS).map(|_| layer(&mut cpu)).collect::<Result<Vec<_>, _>>()?;
    let bytes: u64 = layers.iter().flatten().map(|weight| cpu.weight_bytes(weight)).sum();
    println!("packed {:.2} GB in {:.2} s", bytes as f64 / 1e9, started.elapsed().as_secs_f64());
    let reader = ceilings::Reader::new(threads, 2 << 30)?;

    let (mut bandwidth, mut peak) = (0.0f64, 0.0f64);
    let mut best: Vec<Best> =
        ROWS.iter().map(|&rows| Best { rows, seconds: f64::MAX, by_shape: [f64::MAX; SHAPES.len()] }).collect();
    for _ in 0..rounds {
        for best in &mut best {
            bandwidth = bandwidth.max(reader.pass());
            peak = peak.max(ceilings::bf16_peak(threads));
            measure(&mut cpu, &layers, best)?;
        }
    }
    println!("read {:.1} GB/s, bf16 {:.0} GFLOP/s, {threads} threads", bandwidth / 1e9, peak / 1e9);
    let weights = layers[0].len() as f64 * LAYERS as f64;
    println!("rows  GB/s  of read  GFLOP/s  of peak   by shape, of peak ({weights} weights a pass)");
    for best in &best {
        // A large batch passes over one layer only.
        let share = if best.rows > 16 { 1.0 / LAYERS as f64 } else { 1.0 };
        let read = bytes as f64 * share / best.seconds;
        let flops = read * best.rows as f64;
        let shapes = SHAPES.iter().zip(best.by_shape).map(|(&(outputs, inputs), seconds)| {
            let flops = (2 * outputs * inputs * best.rows) as f64 / seconds;
            format!("{:.0}%", 100.0 * flops / peak)
        });
        println!(
            "{:4}  {:4.1}  {:6.1}%  {:7.0}  {:6.1}%   {}",
            best.rows,
            read / 1e9,
            100.0 * read / bandwidth,
            flops / 1e9,
            100.0 * flops / peak,
            shapes.collect::<Vec<_>>().join(" ")
        );
    }
    Ok(())
}

fn layer(cpu: &mut Cpu) -> Result<Vec<Weight>, folio_device::Error> {
    let pack = |&(outputs, inputs): &(usize, usize)| {
        // One row's bytes stand for all; values are small numbers that differ along the row.
        let row: Vec<u8> = (0..inputs).flat_map(|i| (0x3c00u16 + (i * 37 % 512) as u16).to_le_bytes()).collect();
        let rows = vec![Cow::Borrowed(&row[..]); outputs];
        cpu.weight(&Matrix::from_rows(Format::BF16, inputs, rows)?)
    };
    SHAPES.iter().map(pack).collect()
}

fn measure(cpu: &mut Cpu, layers: &[Vec<Weight>], best: &mut Best) -> Result<(), folio_device::Error> {
    let rows = best.rows;
    let mut total = 0.0;
    let layers = if rows > 16 { &layers[..1] } else { layers };
    let mut sums = [0.0; SHAPES.len()];
    let tensors: Vec<_> = SHAPES
        .iter()
        .map(|&(outputs, inputs)| Ok((cpu.tensor(rows, outputs)?, cpu.tensor(rows, inputs)?)))
        .collect::<Result<_, folio_device::Error>>()?;
    let mut tensors = tensors;
    // Tensors are touched before the clock starts.
    for (weight, (out, x)) in layers[0].iter().zip(&mut tensors) {
        cpu.linear(out, x, weight, None, rows);
    }
    for layer in layers {
        for (index, weight) in layer.iter().enumerate() {
            let (out, x) = &mut tensors[index];
            let start = Instant::now();
            cpu.linear(out, x, weight, None, rows);
            let seconds = start.elapsed().as_secs_f64();
            sums[index] += seconds;
            total += seconds;
        }
    }
    best.seconds = best.seconds.min(total);
    for (best, sum) in best.by_shape.iter_mut().zip(sums) {
        *best = best.min(sum / layers.len() as f64);
    }
    Ok(())
}
