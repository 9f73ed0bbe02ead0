//! Metadata values: the thirteen types that a GGUF file can give a key.

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// The elements of an array all have one type; an empty array still has one.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Evaluates the same expression for every variant of [`Array`]:
/// `each_array!(array, items => expression)`.
macro_rules! each_array {
    ($array:expr, $items:ident => $do:expr) => {
        match $array {
            Array::U8($items) => $do,
            Array::I8($items) => $do,
            Array::U16($items) => $do,
            Array::I16($items) => $do,
            Array::U32($items) => $do,
            Array::I32($items) => $do,
            Array::F32($items) => $do,
            Array::Bool($items) => $do,
            Array::String($items) => $do,
            Array::Array($items) => $do,
            Array::U64($items) => $do,
            Array::I64($items) => $do,
            Array::F64($items) => $do,
        }
    };
}

impl Value {
    /// The type's number in the file.
    pub(super) fn id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    /// The type's name in errors.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Array(array) => array.type_name(),
            _ => NAMES[self.id() as usize],
        }
    }

    /// Any integer type, widened to one that holds them all.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Self::U8(value) => value.into(),
            Self::I8(value) => value.into(),
            Self::U16(value) => value.into(),
            Self::I16(value) => value.into(),
            Self::U32(value) => value.into(),
            Self::I32(value) => value.into(),
            Self::U64(value) => value.into(),
            Self::I64(value) => value.into(),
            _ => return None,
        })
    }
}

const NAMES: [&str; 13] =
    ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "a bool", "a string", "an array", "u64", "i64", "f64"];
const ARRAY_NAMES: [&str; 13] = [
    "an array of u8",
    "an array of i8",
    "an array of u16",
    "an array of i16",
    "an array of u32",
    "an array of i32",
    "an array of f32",
    "an array of bools",
    "an array of strings",
    "an array of arrays",
    "an array of u64",
    "an array of i64",
    "an array of f64",
];

impl Array {
    pub fn len(&self) -> usize {
        each_array!(self, items => items.len())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type's number in the file.
    pub(super) fn id(&self) -> u32 {
        match self {
            Self::U8(_) => 0,
            Self::I8(_) => 1,
            Self::U16(_) => 2,
            Self::I16(_) => 3,
            Self::U32(_) => 4,
            Self::I32(_) => 5,
            Self::F32(_) => 6,
            Self::Bool(_) => 7,
            Self::String(_) => 8,
            Self::Array(_) => 9,
            Self::U64(_) => 10,
            Self::I64(_) => 11,
            Self::F64(_) => 12,
        }
    }

    pub fn type_name(&self) -> &'static str {
        ARRAY_NAMES[self.id() as usize]
    }

    /// The elements as integers, if they are of an integer type.
    pub fn integers(&self) -> Option<Vec<i128>> {
        fn wide<T: Copy + Into<i128>>(items: &[T]) -> Vec<i128> {
            items.iter().map(|item| (*item).into()).collect()
        }
        Some(match self {
            Self::U8(items) => wide(items),
            Self::I8(items) => wide(items),
            Self::U16(items) => wide(items),
            Self::I16(items) => wide(items),
            Self::U32(items) => wide(items),
            Self::I32(items) => wide(items),
            Self::U64(items) => wide(items),
            Self::I64(items) => wide(items),
            _ => return None,
        })
    }
}

macro_rules! from {
    ($($type:ty => $variant:ident),*) => {$(
        impl From<$type> for Value {
            fn from(value: $type) -> Self {
                Self::$variant(value)
            }
        }
        impl From<Vec<$type>> for Value {
            fn from(values: Vec<$type>) -> Self {
                Self::Array(Array::$variant(values))
            }
        }
    )*};
}

from!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, bool => Bool, String => String,
      Array => Array, u64 => U64, i64 => I64, f64 => F64);

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::String(value.to_owned())
    }
}
