//! Measures how well counts predict coins: a rule found on some of them is tried on the others,
//! with the chance of that result.

/// Counts of an answer that a client sees besides its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub accepted: usize,
    pub rejected: usize,
    pub cached: usize,
    pub tokens: usize,
}

/// Features of a rule: the counts, and their difference from those of a server that no other client
/// has used.
const FEATURES: [fn(&Counts, &Counts) -> f64; 6] = [
    |found, _| found.accepted as f64,
    |found, _| found.rejected as f64,
    |found, _| found.accepted as f64 / (found.accepted + found.rejected).max(1) as f64,
    |found, _| found.cached as f64,
    |found, fresh| found.accepted as f64 - fresh.accepted as f64,
    |found, fresh| found.rejected as f64 - fresh.rejected as f64,
];

/// A rule says yes if a feature is above a threshold, or below it.
#[derive(Clone, Copy)]
struct Rule {
    feature: usize,
    threshold: f64,
    above: bool,
}

impl Rule {
    fn says(&self, found: &Counts, fresh: &Counts) -> bool {
        (FEATURES[self.feature](found, fresh) > self.threshold) == self.above
    }
}

/// Guesses all coins after the known ones, by the rule that is right most often on these.
pub fn guess(found: &[Counts], fresh: &[Counts], known: &[bool]) -> Vec<bool> {
    let pairs = || found.iter().zip(fresh);
    let right = |rule: &Rule| pairs().zip(known).filter(|((f, b), coin)| rule.says(f, b) == **coin).count();
    let thresholds = |feature: usize| pairs().take(known.len()).map(move |(f, b)| FEATURES[feature](f, b));
    let rules = (0..FEATURES.len()).flat_map(|feature| {
        thresholds(feature).flat_map(move |threshold| [true, false].map(|above| Rule { feature, threshold, above }))
    });
    let best = rules.max_by_key(right).expect("some coins are known");
    pairs().skip(known.len()).map(|(found, fresh)| best.says(found, fresh)).collect()
}

/// Chance that fair coins give this number of hits of `count`, or a number as far from the half on
/// either side.
pub fn chance(hits: usize, count: usize) -> f64 {
    let far = hits.max(count - hits);
    let (mut log, mut tail) = (-(count as f64) * std::f64::consts::LN_2, 0.0);
    for k in 0..=count {
        if k >= far {
            tail += log.exp();
        }
        log += ((count - k) as f64 / (k + 1) as f64).ln();
    }
    (2.0 * tail).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_are_those_of_coins() {
        for (hits, count, expected) in [
            (5, 10, 1.0),
            (8, 10, 0.109375),
            (2, 10, 0.109375),
            (10, 10, 2.0 / 1024.0),
            (6, 6, 0.03125),
            (115, 200, 0.040037297),
        ] {
            let found = chance(hits, count);
            assert!((found - expected).abs() < 1e-6, "{hits} of {count}: {found}, expected {expected}");
        }
    }

    #[test]
    fn a_rule_finds_what_there_is_to_find() {
        let coins: Vec<bool> = (0..90).map(|n| n * n % 7 > 2).collect();
        let counts = |accepted, rejected| Counts { accepted, rejected, cached: 0, tokens: 30 };
        let fresh: Vec<Counts> = (0..90).map(|n| counts(n * 37 % 20, n * 11 % 30)).collect();
        let with = |coin: bool, n: usize| match coin {
            true => counts(fresh[n].accepted + 1, fresh[n].rejected),
            false => fresh[n],
        };
        let found: Vec<Counts> = coins.iter().enumerate().map(|(n, &coin)| with(coin, n)).collect();
        assert_eq!(guess(&found, &fresh, &coins[..30]), coins[30..]);
        let hits = guess(&fresh, &fresh, &coins[..30]).iter().zip(&coins[30..]).filter(|(a, b)| a == b).count();
        assert!(chance(hits, 60) > 1e-3, "{hits} hits where there is nothing to see");
    }
}
