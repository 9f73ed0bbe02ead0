//! Quantized rows as small integers: `value = scale * level + minimum`.
//!
//! Every quantized format has this form, with any packing: a code per value, a level per code, and
//! a scale (in some formats a minimum too) for each group of neighbours along the row. Kernels that
//! multiply integers are written against it.

/// The shape of a row's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coding {
    /// Values that share a scale: 16, 32, 64, 128 or 256. The last group of a row may be short.
    pub group: usize,
    pub levels: Levels,
    /// Whether groups have a minimum.
    pub affine: bool,
    pub numbers: Numbers,
    pub activations: ActivationScale,
}

/// The levels that codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Levels {
    /// Codes 0 to 15 index a table.
    Nibbles([i8; 16]),
    /// Codes 0 to 31, less `zero`.
    Five { zero: u8 },
    /// Codes 0 to 63, less `zero`.
    Six { zero: u8 },
    /// The code is the level, as two's complement.
    Bytes,
}

/// Form of a group's scale and minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numbers {
    /// Numbers of their own.
    Own,
    /// Integers from -128 to 127, times [`Units`] that [`Coding::BLOCK`] values share.
    Multiples,
}

/// Units of a super-block's scales, and of its minimums.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Units {
    pub scale: f32,
    pub minimum: f32,
}

/// How many values share a scale in the activations that multiply these weights, if they are
/// rounded to integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationScale {
    /// Activations share a scale over as many values as the weights.
    Group,
    /// A whole row, known as "W8A8 per token".
    Row,
}

impl Coding {
    /// Values that share a scale in some coding.
    pub const GROUPS: [usize; 5] = [16, 32, 64, 128, 256];

    /// Values that share units. A row is a whole number of super-blocks.
    pub const BLOCK: usize = 256;

    pub fn num_groups(&self, cols: usize) -> usize {
        cols.div_ceil(self.group)
    }
}

impl Levels {
    /// Codes count up from `least`: the table of an evenly spaced four-bit format.
    pub(crate) const fn nibbles_from(least: i8) -> Self {
        let mut table = [0; 16];
        let mut code = 0;
        while code < 16 {
            table[code] = least + code as i8;
            code += 1;
        }
        Levels::Nibbles(table)
    }

    #[inline]
    pub fn level(&self, code: u8) -> i8 {
        match self {
            Levels::Nibbles(table) => table[usize::from(code & 15)],
            Levels::Five { zero } | Levels::Six { zero } => code as i8 - *zero as i8,
            Levels::Bytes => code as i8,
        }
    }
}
