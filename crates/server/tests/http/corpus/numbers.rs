//! Numbers where numbers belong, and everything else there.

use super::{Case, Expect, Route};

/// The numbers that a field accepts.
#[derive(Clone, Copy, Debug)]
pub enum Range {
    Whole(i128, i128),
    /// Whole numbers in the range, except for 0.
    NotZero(i128, i128),
    Real(f64, f64),
    /// Numbers above the least and up to the most.
    Above(f64, f64),
}

use Range::{Above, NotZero, Real, Whole};

/// The meaning of a JSON text.
enum Sent {
    Number(f64),
    /// Written without a point, and so exact.
    Exact(i128),
    Other,
    /// Text that is not JSON at all.
    Nonsense,
}

const VALUES: &[(&str, Sent)] = &[
    ("0", Sent::Exact(0)),
    ("-1", Sent::Exact(-1)),
    ("2147483648", Sent::Exact(1 << 31)),
    ("4294967296", Sent::Exact(1 << 32)),
    ("9223372036854775808", Sent::Exact(1 << 63)),
    ("-9223372036854775809", Sent::Exact(-(1 << 63) - 1)),
    ("18446744073709551616", Sent::Exact(1 << 64)),
    ("1e308", Sent::Number(1e308)),
    ("-1e308", Sent::Number(-1e308)),
    ("5e-324", Sent::Number(5e-324)),
    ("-5e-324", Sent::Number(-5e-324)),
    ("-0.0", Sent::Number(-0.0)),
    ("0.5", Sent::Number(0.5)),
    ("1e999", Sent::Nonsense),
    ("NaN", Sent::Nonsense),
    ("Infinity", Sent::Nonsense),
    ("-Infinity", Sent::Nonsense),
    ("0x10", Sent::Nonsense),
    ("01", Sent::Nonsense),
    ("\"1\"", Sent::Other),
    ("\"zqmarkerqz\"", Sent::Other),
    ("[]", Sent::Other),
    ("[1]", Sent::Other),
    ("{}", Sent::Other),
    ("true", Sent::Other),
];

impl Range {
    fn takes(self, sent: &Sent) -> bool {
        match (self, sent) {
            (_, Sent::Other | Sent::Nonsense) => false,
            (NotZero(least, most), sent) => Whole(least, most).takes(sent) && !Whole(0, 0).takes(sent),
            (Whole(least, most), Sent::Exact(number)) => (least..=most).contains(number),
            (Whole(least, most), Sent::Number(number)) => {
                // Larger ones are no longer exact.
                number.fract() == 0.0 && number.abs() < 9e15 && (least..=most).contains(&(*number as i128))
            }
            (Real(..) | Above(..), Sent::Exact(number)) => self.takes(&Sent::Number(*number as f64)),
            (Real(least, most), Sent::Number(number)) => (least..=most).contains(number),
            (Above(least, most), Sent::Number(number)) => *number <= most && *number > least,
        }
    }

    /// Numbers just beyond both ends of the range.
    fn beyond(self) -> [String; 2] {
        match self {
            Whole(least, most) | NotZero(least, most) => [(least - 1).to_string(), (most + 1).to_string()],
            Real(least, most) => [format!("{:?}", least - 0.001), format!("{:?}", most + 0.001)],
            Above(least, most) => [format!("{least:?}"), format!("{:?}", most + 0.001)],
        }
    }
}

pub fn add(route: &'static Route, cases: &mut Vec<Case>) {
    for &(field, range) in route.numbers {
        for (json, sent) in VALUES {
            let expect = match sent {
                Sent::Nonsense => Expect::Refused(400, ""),
                sent if range.takes(sent) => Expect::Taken,
                _ => Expect::Refused(400, field),
            };
            cases.push(Case::field(route, field, json, expect));
        }
        for json in range.beyond() {
            cases.push(Case::field(route, field, &json, Expect::Refused(400, field)));
        }
    }
    for field in route.flags {
        for json in ["0", "1", "\"true\"", "\"zqmarkerqz\"", "[]", "{}", "1e308"] {
            cases.push(Case::field(route, field, json, Expect::Refused(400, field)));
        }
    }
}
