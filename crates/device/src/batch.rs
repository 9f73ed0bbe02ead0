//! One step's work as the device hears of it: rows, spans and block tables, and no word of requests.

/// Tokens in a KV block.
pub const BLOCK_TOKENS: usize = 16;

/// Consecutive rows that belong to one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub first_row: u32,
    pub num_rows: u32,
    /// Tokens of the sequence whose keys are readable in this step, this span's rows included: the span's last row is
    /// at position `context - 1`.
    pub context: u32,
}

/// Where one layer group keeps the step's sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupTables {
    /// For every row the slot its key and value go to: `block * BLOCK_TOKENS + offset`.
    pub slots: Vec<u32>,
    /// Block tables of all spans, one after the other; entry `i` of a table holds positions `16 i .. 16 i + 16`.
    pub blocks: Vec<u32>,
    /// Where each span's table starts in `blocks`.
    pub first_block: Vec<u32>,
}

/// A step: any mix of prompt chunks and single tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    pub spans: Vec<Span>,
    /// One entry a layer group.
    pub groups: Vec<GroupTables>,
    /// Rows whose logits are wanted, ascending.
    pub outputs: Vec<u32>,
}

impl Batch {
    pub fn num_rows(&self) -> usize {
        self.tokens.len()
    }
}
