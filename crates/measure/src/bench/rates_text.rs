//! Rates as a table for people.

use super::waste::Waste;
use crate::rates::{Rates, Streams};
use crate::table;

const HEAD: [&str; 12] = [
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

impl Rates {
    pub fn text(&self) -> String {
        let mut text = format!(
            "{}: {}, {} in / {} out, best of {} rounds; of read: their median, each beside its own reads\n",
            self.model, self.device, self.input_len, self.output_len, self.rounds
        );
        text += &format!(
            "ceilings: {}; decode of one stream reads {} of weights a step\n",
            self.ceilings.describe(),
            table::bytes(self.decode_bytes),
        );
        text += &format!("start: {}\n", self.start_described);
        text += &format!(
            "memory: weights {}, keys and values {}, activations {}; most resident while loading {}\n\n",
            table::bytes(self.memory.weights),
            table::bytes(self.memory.kv),
            table::bytes(self.memory.activations),
            self.memory.resident_peak_loading.map_or("unknown".into(), table::bytes),
        );
        let mut lines = vec![HEAD.map(String::from).to_vec()];
        lines.extend(self.results.iter().map(Streams::line));
        text += &table::render(&lines);
        text += "\n";
        for streams in &self.results {
            text += &format!("{} at once: {}\n", streams.streams, Waste::describe(streams));
        }
        text
    }
}

impl Streams {
    fn line(&self) -> Vec<String> {
        let percent = |share: Option<f64>| share.map_or("-".into(), |share| format!("{:.1}%", share * 100.0));
        let rate = |rate: Option<f64>, decimals: usize| rate.map_or("-".into(), |rate| format!("{rate:.decimals$}"));
        let mut line = vec![
            self.streams.to_string(),
            format!("{:.1} ms", self.first_token_ms),
            rate(self.prefill_tokens_per_s, 0),
            percent(self.prefill_of_bf16_peak),
            rate(self.decode_tokens_per_s, 1),
            percent(self.decode_of_read_bandwidth),
            percent(self.decode_of_bf16_peak),
        ];
        line.extend([self.itl_ms_p50, self.itl_ms_p95, self.itl_ms_p99].map(|ms| format!("{ms:.2} ms")));
        line.extend([self.input_tokens_per_s, self.total_tokens_per_s].map(|rate| format!("{rate:.1}")));
        line
    }
}

#[cfg(test)]
mod tests {
    use crate::rates::Rates;
    use crate::rates::tests::printed;

    #[test]
    fn a_table_with_a_line_for_each_number_of_streams() {
        let mut rates = Rates::parse(&printed().to_string()).expect("a report");
        (rates.decode_bytes, rates.start_described) = (2 << 20, "weights 0.50 s".into());
        let mut several = rates.results[0].clone();
        (several.streams, several.prefill_tokens_per_s, several.prefill_of_bf16_peak) = (4, None, None);
        rates.results.push(several);
        let text = rates.text();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        let cells = "1 2.0 ms 8000 50.0% 60.0 90.0% 1.0% 1.00 ms 1.50 ms 2.00 ms 100.0 50.0";
        assert!(lines.contains(&cells.split(' ').collect()), "{text}");
        assert!(
            lines.contains(&cells.replace("8000 50.0%", "- -").replacen('1', "4", 1).split(' ').collect()),
            "{text}"
        );
        for part in
            ["ceilings: read 30.0 GB/s, bf16 0.4 TFLOP/s", "reads 2.0 MiB of weights", "4 at once: waste 10.00%"]
        {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}
