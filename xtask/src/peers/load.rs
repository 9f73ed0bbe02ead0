//! Other load on the machine during a measurement: a figure from a busy machine is marked.

/// CPU time in clock ticks, all cores together.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ticks {
    /// Spent by any process; time stolen by the host counts.
    busy: u64,
    total: u64,
    /// Spent by this process and by those it started and waited for.
    own: u64,
}

/// A watched period of time.
pub struct Watch {
    begin: Option<Ticks>,
}

impl Watch {
    pub fn start() -> Self {
        Self { begin: now() }
    }

    /// The share of all cores that other processes used since, 0 to 1; none if the system does not
    /// report it.
    pub fn others(&self) -> Option<f64> {
        Some(share(self.begin?, now()?))
    }
}

fn share(begin: Ticks, end: Ticks) -> f64 {
    let busy = end.busy.saturating_sub(begin.busy);
    let others = busy.saturating_sub(end.own.saturating_sub(begin.own));
    others as f64 / end.total.saturating_sub(begin.total).max(1) as f64
}

fn now() -> Option<Ticks> {
    let system = std::fs::read_to_string("/proc/stat").ok()?;
    let own = std::fs::read_to_string("/proc/self/stat").ok()?;
    ticks(&system, &own)
}

fn ticks(system: &str, own: &str) -> Option<Ticks> {
    let first = system.lines().next()?.strip_prefix("cpu ")?;
    // user nice system idle iowait irq softirq steal; the later fields are counted in user and nice
    // already.
    let fields: Vec<u64> = first.split_whitespace().take(8).filter_map(|field| field.parse().ok()).collect();
    let total: u64 = fields.iter().sum();
    let idle = fields.get(3)? + fields.get(4)?;
    // The program's name may contain anything, so fields are counted behind it: state is field 3;
    // 14 to 17 are own and children's times.
    let fields: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
    let own = fields.get(11..15)?.iter().filter_map(|field| field.parse::<u64>().ok()).sum();
    Some(Ticks { busy: total - idle, total, own })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_those_that_are_not_ours() {
        let stat = |user: u64, idle: u64| format!("cpu  {user} 0 0 {idle} 10 0 0 0 99 0\ncpu0 1 2 3\n");
        let own = |ticks: u64| format!("42 (a) b) R 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 5 0");
        let begin = ticks(&stat(100, 100), &own(50)).unwrap();
        assert_eq!(begin, Ticks { busy: 100, total: 210, own: 50 });
        let end = ticks(&stat(180, 120), &own(110)).unwrap();
        // 80 of 100 ticks were busy, 60 of them ours.
        assert_eq!(share(begin, end), 0.2);
        assert_eq!(ticks("", ""), None);
    }
}
