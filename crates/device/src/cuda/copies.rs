//! Copies rows and columns from one tensor to another, of either type. Numbers from the host travel
//! as arguments of the kernel, so that the host waits for no copy.

use super::driver::{Device, KernelArg, args};
use super::launch;
use super::tensor::Tensor;

/// Most runs that one launch copies.
const AT_ONCE: usize = 128;
/// Rows of a run that are copied side by side.
const MOST_ROWS: u32 = 64;

/// Mirrors `Runs`: from, to and how many, of each.
#[derive(Clone, Copy)]
#[repr(C)]
struct Runs {
    words: [u32; 3 * AT_ONCE],
}

const _: () = assert!(size_of::<Runs>() == 1536);

// SAFETY: repr(C), numbers only, as in copies.cu.
unsafe impl KernelArg for Runs {}

fn name(kind: &str, x: &Tensor, out: &Tensor) -> String {
    format!("{kind}_{}_{}", x.float().name(), out.float().name())
}

fn columns(width: usize) -> u32 {
    width.div_ceil(1024) as u32
}

pub(super) fn copy_columns(device: &Device, out: &Tensor, column: usize, x: &Tensor, rows: usize) {
    let (all, width) = (out.cols(), x.cols());
    assert!(column + width <= all, "columns {column}..{} of {all}", column + width);
    out.check("a copy's target", rows, all);
    x.check("a copy's source", rows, width);
    if rows * width == 0 {
        return;
    }
    let grid = [columns(width), rows as u32, 1];
    let (name, column, all, width) = (name("copy_columns", x, out), column as i32, all as i32, width as i32);
    launch(device, &name, grid, 256, args![out.ptr(), x.ptr(), column, all, width]);
}

pub(super) fn copy_rows(device: &Device, out: &Tensor, x: &Tensor, pairs: &[(u32, u32)]) {
    let width = x.cols();
    for &(from, to) in pairs {
        x.check("a copied row's source", from as usize + 1, width);
        out.check("a copied row's target", to as usize + 1, width);
    }
    if width == 0 {
        return;
    }
    for some in runs(pairs).chunks(AT_ONCE) {
        let mut runs = Runs { words: [0; 3 * AT_ONCE] };
        for (words, run) in runs.words.chunks_exact_mut(3).zip(some) {
            words.copy_from_slice(run);
        }
        let longest = some.iter().map(|run| run[2]).max().unwrap_or(1);
        let grid = [columns(width), longest.min(MOST_ROWS), some.len() as u32];
        launch(device, &name("copy_rows", x, out), grid, 256, args![out.ptr(), x.ptr(), runs, width as i32]);
    }
}

/// Merges pairs of (from, to) that follow each other on both sides: from, to and count.
fn runs(pairs: &[(u32, u32)]) -> Vec<[u32; 3]> {
    let mut runs: Vec<[u32; 3]> = Vec::new();
    for &(from, to) in pairs {
        match runs.last_mut() {
            Some([first, target, count]) if (*first + *count, *target + *count) == (from, to) => *count += 1,
            _ => runs.push([from, to, 1]),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn rows_that_follow_each_other_go_together() {
        assert_eq!(runs(&[]), Vec::<[u32; 3]>::new());
        assert_eq!(runs(&[(4, 0), (5, 1), (6, 2), (8, 3), (9, 5), (10, 6)]), [[4, 0, 3], [8, 3, 1], [9, 5, 2]]);
        assert_eq!(runs(&[(2, 2), (1, 1), (1, 3)]), [[2, 2, 1], [1, 1, 1], [1, 3, 1]]);
    }
}
