//! Pearson's chi-square of counts and their probabilities, and how often fair draws exceed it.

/// Cells that are expected less often than this are counted together.
const FEWEST: f64 = 5.0;

/// Squares of any number of independent tables, added.
#[derive(Clone, Debug, Default)]
pub struct Fit {
    square: f64,
    freedom: usize,
    /// A value of probability zero occurred.
    is_impossible: bool,
}

impl Fit {
    /// Adds draws of one distribution.
    pub fn add(&mut self, counts: &[u32], chances: &[f64]) {
        let total = f64::from(counts.iter().sum::<u32>());
        let cells = counts.iter().zip(chances).map(|(&count, &chance)| (f64::from(count), chance * total));
        self.is_impossible |= counts.iter().zip(chances).any(|(&count, &chance)| count > 0 && chance == 0.0);
        let (mut often, rare): (Vec<_>, Vec<_>) = cells.partition(|&(_, expected)| expected >= FEWEST);
        let rare = rare.into_iter().fold((0.0, 0.0), |sum, cell| (sum.0 + cell.0, sum.1 + cell.1));
        if rare.1 >= FEWEST {
            often.push(rare);
        } else if let Some(least) = often.iter_mut().min_by(|a, b| a.1.total_cmp(&b.1)) {
            // Even together they are too rare.
            *least = (least.0 + rare.0, least.1 + rare.1);
        }
        self.square += often.iter().map(|(count, expected)| (count - expected).powi(2) / expected).sum::<f64>();
        self.freedom += often.len().saturating_sub(1);
    }

    /// Probability that fair draws fit no better.
    pub fn p(&self) -> f64 {
        match (self.is_impossible, self.freedom) {
            (true, _) => 0.0,
            (false, 0) => 1.0,
            (false, freedom) => upper_gamma(0.5 * freedom as f64, 0.5 * self.square),
        }
    }
}

/// The regularised upper incomplete gamma function Q(a, x): by its series below the bulk of the
/// mass, by Lentz's continued fraction above.
fn upper_gamma(a: f64, x: f64) -> f64 {
    const STEPS: usize = 100_000;
    const TINY: f64 = 1e-300;
    if x <= 0.0 {
        return 1.0;
    }
    let front = (a * x.ln() - x - ln_gamma(a)).exp();
    if x < a + 1.0 {
        let (mut term, mut sum) = (1.0 / a, 1.0 / a);
        for step in 1..STEPS {
            term *= x / (a + step as f64);
            sum += term;
            if term < sum * f64::EPSILON {
                break;
            }
        }
        return 1.0 - front * sum;
    }
    let mut b = x + 1.0 - a;
    let (mut c, mut d) = (1.0 / TINY, 1.0 / b);
    let mut fraction = d;
    for step in 1..STEPS {
        let step = step as f64;
        let an = -step * (step - a);
        b += 2.0;
        let nonzero = |value: f64| if value.abs() < TINY { TINY } else { value };
        d = 1.0 / nonzero(an * d + b);
        c = nonzero(b + an / c);
        fraction *= d * c;
        if (d * c - 1.0).abs() < f64::EPSILON {
            break;
        }
    }
    front * fraction
}

/// By Stirling's series, after the recurrence has raised the argument above 15.
fn ln_gamma(mut x: f64) -> f64 {
    let mut shift = 0.0;
    while x < 15.0 {
        shift -= x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / x;
    let square = inverse * inverse;
    let series = inverse * (1.0 / 12.0 - square * (1.0 / 360.0 - square * (1.0 / 1260.0 - square / 1680.0)));
    shift + (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Random;

    fn p(square: f64, freedom: usize) -> f64 {
        Fit { square, freedom, is_impossible: false }.p()
    }

    /// Critical values of printed tables.
    #[test]
    fn p_values_are_those_of_the_tables() {
        for (freedom, square, expected) in [
            (1, 1.0, 0.317310507863),
            (1, 3.841458820694, 0.05),
            (1, 6.634896601021, 0.01),
            (3, 7.814727903251, 0.05),
            (5, 11.070497693516, 0.05),
            (5, 15.086272469389, 0.01),
            (10, 18.307038053275, 0.05),
            (15, 30.577914166892, 0.01),
            (30, 50.892181311517, 0.01),
            (100, 135.806723171027, 0.01),
        ] {
            let found = p(square, freedom);
            assert!((found - expected).abs() < 1e-9, "{freedom} degrees, {square}: {found}, expected {expected}");
        }
    }

    /// For an even number of degrees Q is a finite sum, that of Poisson's distribution.
    #[test]
    fn p_values_are_sums_of_poissons_distribution() {
        for half in [1, 2, 7, 40, 300, 2000] {
            for factor in [0.01, 0.7, 0.95, 1.0, 1.05, 1.4, 3.0] {
                let mean = factor * half as f64;
                let mut log = -mean;
                let mut sum = 0.0;
                for i in 1..=half {
                    sum += log.exp();
                    log += (mean / i as f64).ln();
                }
                let found = p(2.0 * mean, 2 * half);
                assert!(
                    (found - sum).abs() < 1e-9 + 1e-7 * sum,
                    "half of {half}, mean {mean}: {found}, expected {sum}"
                );
            }
        }
    }

    #[test]
    fn logarithms_of_factorials() {
        let mut log = 0.0;
        for n in 1..200u32 {
            assert!((ln_gamma(f64::from(n)) - log).abs() < 1e-11 * log.max(1.0), "{n}");
            log += f64::from(n).ln();
        }
        assert!((ln_gamma(0.5) - 0.5 * std::f64::consts::PI.ln()).abs() < 1e-13);
    }

    #[test]
    fn rare_cells_are_counted_together() {
        let mut fit = Fit::default();
        fit.add(&[50, 44, 2, 4, 0], &[0.5, 0.42, 0.04, 0.04, 0.0]);
        assert_eq!(fit.freedom, 2);
        assert!((fit.square - (4.0 / 42.0 + 4.0 / 8.0)).abs() < 1e-12, "{fit:?}");
        // A cell that is too rare alone is added to the least of the others; without others there
        // is no test.
        let mut fit = Fit::default();
        fit.add(&[52, 45, 3], &[0.5, 0.46, 0.04]);
        assert_eq!(fit.freedom, 1);
        assert!((fit.square - (4.0 / 50.0 + 4.0 / 50.0)).abs() < 1e-12, "{fit:?}");
        fit.add(&[1, 2], &[0.5, 0.5]);
        assert_eq!(fit.freedom, 1);
        fit.add(&[100, 1], &[1.0, 0.0]);
        assert_eq!(fit.p(), 0.0);
    }

    /// Fair draws are rejected as often as they should be.
    #[test]
    fn fair_draws_have_uniform_p_values() {
        let chances = [0.4, 0.3, 0.15, 0.1, 0.04, 0.01];
        let mut random = Random(5);
        let mut tenths = [0; 10];
        for _ in 0..1000 {
            let mut counts = [0; 6];
            for _ in 0..1000 {
                let mut rest = random.unit();
                let fell = |&chance: &f64| {
                    rest -= chance;
                    rest < 0.0
                };
                counts[chances.iter().position(fell).unwrap_or(5)] += 1;
            }
            let mut fit = Fit::default();
            fit.add(&counts, &chances);
            tenths[((fit.p() * 10.0) as usize).min(9)] += 1;
        }
        // Four standard deviations of a binomial of 1000 and 0.1.
        assert!(tenths.iter().all(|count| (62..=138).contains(count)), "{tenths:?}");
    }
}
