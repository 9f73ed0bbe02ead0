//! The figures, as a table or as JSON.

use anyhow::Result;
use folio_measure::stats::{Median, median, percentile};
use folio_session::Session;
use serde_json::{Value, json};

use super::ceilings::Best;
use super::cost::Cost;
use super::measure::Measured;
use super::waste::Waste;
use crate::args::BenchRun;
use crate::table;

pub fn print(
    args: &BenchRun,
    session: &Session,
    cost: &Cost,
    ceilings: &Best,
    resident: Option<u64>,
    results: &[Measured],
) -> Result<()> {
    let rows: Vec<Figures> = results.iter().map(|result| Figures::of(args, cost, ceilings, result)).collect();
    if args.common.json {
        return outln!("{}", json(args, session, ceilings, resident, &rows));
    }
    outln!(
        "{}: {}, {} in / {} out, best of {} rounds; of read: their median, each beside its own reads",
        session.assets.name,
        session.plan.device,
        args.input_len,
        args.output_len,
        args.rounds
    )?;
    outln!(
        "ceilings: {}; decode of one stream reads {} of weights a step",
        ceilings.describe(),
        table::bytes(cost.decode_bytes(1) as u64),
    )?;
    outln!("start: {}", session.phases.describe())?;
    outln!(
        "memory: weights {}, keys and values {}, activations {}; most resident while loading {}\n",
        table::bytes(session.plan.bytes.weights),
        table::bytes(session.plan.bytes.kv),
        table::bytes(session.plan.bytes.activations),
        resident.map_or("unknown".into(), table::bytes),
    )?;
    let head = [
        "streams",
        "first token",
        "prefill tok/s",
        "of peak",
        "decode tok/s",
        "of read",
        "of peak",
        "itl p50",
        "p95",
        "p99",
        "in tok/s",
        "out tok/s",
    ];
    let mut lines = vec![head.map(String::from).to_vec()];
    lines.extend(rows.iter().map(Figures::line));
    out!("{}", table::render(&lines))?;
    out!("\n")?;
    for row in &rows {
        outln!("{} at once: {}", row.streams, row.waste.describe())?;
    }
    Ok(())
}

struct Figures {
    streams: usize,
    first_token_ms: f64,
    /// Known for one stream only: with several, the first token waits for other prompts.
    prefill: Option<(f64, f64)>,
    decode: Option<Decode>,
    itl_ms: [f64; 3],
    /// Over the whole run.
    input_tokens_per_s: f64,
    total_tokens_per_s: f64,
    waste: Waste,
}

/// Rates while every stream decodes.
struct Decode {
    tokens_per_s: f64,
    /// Of each round, beside its own reads.
    pairs: Vec<f64>,
    tokens_per_byte: Median,
    /// From that median.
    of_read: f64,
    of_peak: f64,
}

impl Decode {
    /// A step reads `bytes`, a token takes `flops`.
    fn of(result: &Measured, bytes: f64, flops: f64, ceilings: &Best) -> Option<Self> {
        let tokens_per_s = result.decode_tokens_per_s?;
        let tokens_per_byte = median(&result.decode_tokens_per_byte);
        Some(Self {
            tokens_per_s,
            pairs: result.decode_tokens_per_byte.clone(),
            tokens_per_byte,
            of_read: tokens_per_byte.middle / result.streams as f64 * bytes,
            of_peak: tokens_per_s * flops / ceilings.bf16_flops,
        })
    }

    fn per_byte(&self) -> Value {
        let Median { middle, low, high } = self.tokens_per_byte;
        json!({"median": middle, "low": low, "high": high, "pairs": self.pairs})
    }
}

impl Figures {
    fn of(args: &BenchRun, cost: &Cost, ceilings: &Best, result: &Measured) -> Self {
        let first = result.first_token.as_secs_f64();
        let prefill = (result.streams == 1)
            .then(|| (args.input_len as f64 / first, cost.prefill_flops(args.input_len) / first / ceilings.bf16_flops));
        let context = args.input_len + args.output_len / 2;
        let decode = Decode::of(result, cost.decode_bytes(result.streams), cost.decode_flops(context), ceilings);
        Self {
            streams: result.streams,
            first_token_ms: first * 1e3,
            prefill,
            decode,
            itl_ms: [50.0, 95.0, 99.0]
                .map(|percent| percentile(&result.gaps, percent).unwrap_or_default().as_secs_f64() * 1e3),
            input_tokens_per_s: result.input_tokens_per_s,
            total_tokens_per_s: result.total_tokens_per_s,
            waste: result.waste,
        }
    }

    fn line(&self) -> Vec<String> {
        let percent = |share: f64| format!("{:.1}%", share * 100.0);
        let (prefill, of_peak) = match self.prefill {
            Some((rate, share)) => (format!("{rate:.0}"), percent(share)),
            None => ("-".into(), "-".into()),
        };
        let mut line = vec![self.streams.to_string(), format!("{:.1} ms", self.first_token_ms), prefill, of_peak];
        match &self.decode {
            Some(d) => line.extend([format!("{:.1}", d.tokens_per_s), percent(d.of_read), percent(d.of_peak)]),
            None => line.extend(["-", "-", "-"].map(String::from)),
        }
        line.extend(self.itl_ms.map(|ms| format!("{ms:.2} ms")));
        line.extend([self.input_tokens_per_s, self.total_tokens_per_s].map(|rate| format!("{rate:.1}")));
        line
    }
}

fn json(args: &BenchRun, session: &Session, ceilings: &Best, resident: Option<u64>, rows: &[Figures]) -> Value {
    let row = |f: &Figures| {
        json!({
            "streams": f.streams, "first_token_ms": f.first_token_ms,
            "prefill_tokens_per_s": f.prefill.map(|p| p.0), "prefill_of_bf16_peak": f.prefill.map(|p| p.1),
            "decode_tokens_per_s": f.decode.as_ref().map(|d| d.tokens_per_s),
            "decode_of_read_bandwidth": f.decode.as_ref().map(|d| d.of_read),
            "decode_tokens_per_byte_read": f.decode.as_ref().map(Decode::per_byte),
            "decode_of_bf16_peak": f.decode.as_ref().map(|d| d.of_peak), "itl_ms_p50": f.itl_ms[0], "itl_ms_p95": f.itl_ms[1],
            "itl_ms_p99": f.itl_ms[2], "total_tokens_per_s": f.total_tokens_per_s,
            "input_tokens_per_s": f.input_tokens_per_s, "waste": f.waste.share(),
            "waste_bound": f.waste.bound(), "mean_live_length": f.waste.mean_live_length(),
        })
    };
    json!({
        "model": session.assets.name, "device": session.plan.device, "start": session.phases.json(), "threads": session.plan.threads, "input_len": args.input_len,
        "output_len": args.output_len, "rounds": args.rounds,
        "ceilings": {
            "read_bytes_per_s": ceilings.read_bytes, "bf16_flops": ceilings.bf16_flops,
            "others": ceilings.others.iter().map(|(what, rate)| json!({"what": what, "per_s": rate})).collect::<Vec<_>>(),
        },
        "memory": {
            "weights": session.plan.bytes.weights, "kv": session.plan.bytes.kv,
            "activations": session.plan.bytes.activations,
            "resident_peak_loading": resident,
        },
        "results": rows.iter().map(row).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_reads_is_the_median_of_pairs() {
        let mut result = Measured::new(2);
        result.decode_tokens_per_s = Some(31.0);
        // The memory is slow for as long as anything decodes, and fast once before: the best read says nothing.
        result.pair(Some(30.0), [32e9, 32e9]);
        result.pair(Some(30.0), [64e9, 32e9]);
        result.pair(Some(31.0), [32e9, 32e9]);
        let ceilings = Best { read_bytes: 64e9, bf16_flops: 1e12, ..Best::default() };
        let decode = Decode::of(&result, 2e9, 1e9, &ceilings).expect("a rate");
        assert!((decode.of_read - 30.0 / 32.0).abs() < 1e-9, "{}", decode.of_read);
        assert!((decode.of_peak - 0.031).abs() < 1e-9, "{}", decode.of_peak);
        let per_byte = decode.per_byte();
        assert_eq!(per_byte["median"].as_f64(), Some(30.0 / 32e9));
        assert_eq!([&per_byte["low"], &per_byte["high"]].map(Value::as_f64), [Some(30.0 / 48e9), Some(31.0 / 32e9)]);
        assert_eq!(per_byte["pairs"].as_array().map(Vec::len), Some(3));
        assert!(Decode::of(&Measured::new(1), 2e9, 1e9, &ceilings).is_none());
    }
}
