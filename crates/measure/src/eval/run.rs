//! Walks the windows of a text with one model, or with two side by side, step by step: no more
//! logits are kept than those of one step.

use std::ops::Range;

use anyhow::{Context, Result};

use super::measure::{self, Comparison, Guess, Pair, Score};
use super::reader::{Reader, step_rows};
use super::text::Windows;
use crate::progress::Progress;

/// The text that all models of one evaluation read, and how they read it.
pub struct Course<'a> {
    pub windows: &'a Windows,
    pub vocabulary: usize,
    /// Threads that measure.
    pub threads: usize,
    pub progress: &'a dyn Progress,
}

impl Course<'_> {
    /// How well a model predicts.
    pub fn score(&self, stage: &str, model: &mut dyn Reader) -> Result<Score> {
        let mut logits = Vec::new();
        let mut guesses: Vec<Guess> = Vec::with_capacity(self.windows.num_tokens());
        self.walk(stage, |window, rows| {
            model.read(window, rows.clone(), &mut logits)?;
            guesses.extend(measure::guesses(&logits, &window[rows.start + 1..=rows.end], self.threads)?);
            Ok(())
        })?;
        Ok(Score::of(guesses.into_iter()))
    }

    /// How a model predicts beside another.
    pub fn compare(&self, stage: &str, base: &mut dyn Reader, model: &mut dyn Reader) -> Result<Comparison> {
        let (mut of_base, mut of_model) = (Vec::new(), Vec::new());
        let mut pairs: Vec<Pair> = Vec::with_capacity(self.windows.num_tokens());
        self.walk(stage, |window, rows| {
            base.read(window, rows.clone(), &mut of_base).context("the base")?;
            model.read(window, rows.clone(), &mut of_model)?;
            pairs.extend(measure::pairs(&of_base, &of_model, &window[rows.start + 1..=rows.end], self.threads)?);
            Ok(())
        })?;
        Ok(Comparison::of(&pairs))
    }

    /// Every step of every window; a window's last token is predicted and never read.
    fn walk(&self, stage: &str, mut step: impl FnMut(&[u32], Range<usize>) -> Result<()>) -> Result<()> {
        self.progress.begin(stage, self.windows.num_tokens());
        for (number, window) in self.windows.windows.iter().enumerate() {
            let last = window.len() - 1;
            for first in (0..last).step_by(step_rows(self.vocabulary)) {
                let rows = first..last.min(first + step_rows(self.vocabulary));
                step(window, rows.clone()).with_context(|| format!("window {number}, tokens {rows:?}"))?;
                self.progress.advance(rows.len());
            }
            self.progress.advance(1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Unwatched;

    /// Expects the token after the one it reads, with some confidence.
    struct Successor {
        confidence: f32,
        reads: Vec<Range<usize>>,
    }

    impl Reader for Successor {
        fn read(&mut self, window: &[u32], rows: Range<usize>, logits: &mut Vec<f32>) -> Result<()> {
            logits.clear();
            for &token in &window[rows.clone()] {
                logits.extend((0..4).map(|next| if next == (token + 1) % 4 { self.confidence } else { 0.0 }));
            }
            self.reads.push(rows);
            Ok(())
        }

        fn weight_bytes(&self) -> u64 {
            0
        }
    }

    #[test]
    fn all_but_first_tokens_are_scored_in_steps() {
        let windows = Windows { windows: vec![(0..1026).map(|i| i % 4).collect(), vec![2, 0]], text_bytes: 0.0 };
        let course = Course { windows: &windows, vocabulary: 4, threads: 2, progress: &Unwatched };
        let mut sure = Successor { confidence: 5.0, reads: Vec::new() };
        let score = course.score("", &mut sure).expect("finite");
        assert_eq!(sure.reads, [0..512, 512..1024, 1024..1025, 0..1]);
        let right = (1.0 + 3.0 * (-5f64).exp()).ln();
        let expected = (1025.0 * right + right + 5.0) / 1026.0;
        assert_eq!(score.scored, 1026);
        assert!((score.nats - expected).abs() < 1e-9, "{} and {expected}", score.nats);
        let mut unsure = Successor { confidence: 0.5, reads: Vec::new() };
        let compared = course.compare("", &mut sure, &mut unsure).expect("finite");
        assert_eq!(compared.base, score);
        assert_eq!(compared.agreement, 1.0);
        assert!(compared.divergence_mean > 0.1 && compared.perplexity_change() > 0.1, "{compared:?}");
    }
}
