//! The latest published batches, which every peer reads at its own pace.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::watch;

/// The most bytes of payloads: a long replay buffer of large prompts must not grow without end.
const MAX_KEPT_BYTES: usize = 64 << 20;

/// One message of the log.
#[derive(Debug)]
pub struct Batch {
    pub seq: u64,
    pub payload: Vec<u8>,
}

#[derive(Debug)]
pub struct Log {
    kept: watch::Sender<Kept>,
    max_batches: usize,
}

#[derive(Debug, Default)]
struct Kept {
    /// Consecutive numbers, the last one before `next_seq`.
    batches: VecDeque<Arc<Batch>>,
    bytes: usize,
    next_seq: u64,
}

impl Kept {
    /// The batches from number `seq` on that are still kept.
    fn since(&self, seq: u64) -> impl Iterator<Item = &Arc<Batch>> {
        let oldest = self.next_seq - self.batches.len() as u64;
        let skip = seq.saturating_sub(oldest).min(self.batches.len() as u64);
        self.batches.iter().skip(skip as usize)
    }
}

impl Log {
    pub fn new(max_batches: usize) -> Self {
        Self { kept: watch::Sender::default(), max_batches: max_batches.max(1) }
    }

    /// Appends a payload under the next number and wakes the peers that wait for it.
    pub fn push(&self, payload: Vec<u8>) {
        self.kept.send_modify(|kept| {
            kept.bytes += payload.len();
            kept.batches.push_back(Arc::new(Batch { seq: kept.next_seq, payload }));
            kept.next_seq += 1;
            // The newest batch always stays, since subscribers read it from here.
            while kept.batches.len() > self.max_batches || (kept.bytes > MAX_KEPT_BYTES && kept.batches.len() > 1) {
                let Some(oldest) = kept.batches.pop_front() else { break };
                kept.bytes -= oldest.payload.len();
            }
        });
    }

    /// The number that the next batch will have.
    pub fn next_seq(&self) -> u64 {
        self.kept.borrow().next_seq
    }

    /// All batches from number `seq` on that are still kept.
    pub fn since(&self, seq: u64) -> Vec<Arc<Batch>> {
        self.kept.borrow().since(seq).cloned().collect()
    }

    /// Waits for batch `seq`; gives a later one if `seq` was dropped already.
    pub async fn at_or_after(&self, seq: u64) -> Arc<Batch> {
        let mut changes = self.kept.subscribe();
        loop {
            if let Some(batch) = changes.borrow_and_update().since(seq).next() {
                return Arc::clone(batch);
            }
            if changes.changed().await.is_err() {
                unreachable!("the log is borrowed while this waits");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seqs(log: &Log, since: u64) -> Vec<u64> {
        log.since(since).iter().map(|batch| batch.seq).collect()
    }

    #[test]
    fn keeps_the_last_batches() {
        let log = Log::new(3);
        assert!(seqs(&log, 0).is_empty());
        for byte in 0..5 {
            log.push(vec![byte]);
        }
        assert_eq!(log.next_seq(), 5);
        for (since, expect) in [(0, &[2, 3, 4][..]), (2, &[2, 3, 4]), (4, &[4]), (5, &[]), (u64::MAX, &[])] {
            assert_eq!(seqs(&log, since), expect, "since {since}");
        }
        assert_eq!(log.since(3)[0].payload, [3]);
    }

    #[test]
    fn keeps_no_more_bytes_than_allowed() {
        let log = Log::new(100);
        for _ in 0..3 {
            log.push(vec![0; MAX_KEPT_BYTES / 2]);
        }
        assert_eq!(seqs(&log, 0), [1, 2]);
        log.push(vec![0; MAX_KEPT_BYTES + 1]);
        assert_eq!(seqs(&log, 0), [3]);
    }
}
