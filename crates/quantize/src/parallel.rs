//! Rows of a matrix divided over threads. Every row's result depends on that row alone, so the
//! number of threads never affects a result.

/// Calls `work(first_row, rows)` on contiguous runs of whole rows, one run a thread.
pub(crate) fn rows<T: Send>(threads: usize, data: &mut [T], width: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    let num_rows = data.len() / width.max(1);
    let each = num_rows.div_ceil(threads.max(1)).max(1);
    if each >= num_rows {
        return work(0, data);
    }
    std::thread::scope(|scope| {
        for (run, rows) in data.chunks_mut(each * width).enumerate() {
            let work = &work;
            scope.spawn(move || work(run * each, rows));
        }
    });
}

/// The results of `work(index)`, in order; threads take indices one by one.
pub(crate) fn map<T: Send>(threads: usize, count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let mut out: Vec<Option<T>> = (0..count).map(|_| None).collect();
    let threads = threads.clamp(1, count.max(1));
    std::thread::scope(|scope| {
        let mut shares: Vec<Vec<(usize, &mut Option<T>)>> = (0..threads).map(|_| Vec::new()).collect();
        for (index, slot) in out.iter_mut().enumerate() {
            shares[index % threads].push((index, slot));
        }
        for share in shares {
            let work = &work;
            scope.spawn(move || share.into_iter().for_each(|(index, slot)| *slot = Some(work(index))));
        }
    });
    out.into_iter().map(|slot| slot.expect("every index was dealt out")).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_row_is_visited_once() {
        for threads in [1, 2, 3, 8] {
            let mut data = vec![0; 5 * 3];
            super::rows(threads, &mut data, 3, |first, rows| {
                for (row, values) in rows.chunks_mut(3).enumerate() {
                    values.iter_mut().for_each(|value| *value += first + row + 1);
                }
            });
            assert_eq!(data, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]);
            assert_eq!(super::map(threads, 4, |index| index * index), [0, 1, 4, 9]);
        }
        assert!(super::map(2, 0, |index| index).is_empty());
    }
}
