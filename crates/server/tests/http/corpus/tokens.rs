//! Token ids: the last there is, the first there is not, and what is no id.

use super::{Case, Expect, Route};
use crate::harness::WIDE;

pub fn add(route: &'static Route, cases: &mut Vec<Case>) {
    for &(field, least) in route.token_lists {
        let mut push = |json: &str, expect| cases.push(Case::field(route, field, json, expect));
        let refused = Expect::Refused(400, field);
        push(&format!("[{}]", WIDE - 1), Expect::Taken);
        push(&format!("[{WIDE}]"), refused);
        for json in [
            "[-1]",
            "[4294967296]",
            "[4294967295]",
            "[2147483647]",
            "[18446744073709551616]",
            "[9223372036854775807]",
            "[1.5]",
            "[1e308]",
            "[null]",
            "[true]",
            "[{}]",
            "[0, [1]]",
            "[0, \"zqmarkerqz\"]",
            "{\"0\": 1}",
            "true",
            "7",
        ] {
            push(json, refused);
        }
        push("[]", if least == 0 { Expect::Taken } else { refused });
        push("[NaN]", Expect::Refused(400, ""));
        let many = vec!["0"; 100_000].join(",");
        push(&format!("[{many}]"), if route.takes_many_tokens { Expect::Taken } else { refused });
    }
    if route.has_bias {
        bias(route, cases);
    }
}

fn bias(route: &'static Route, cases: &mut Vec<Case>) {
    let mut push = |json: &str, expect| cases.push(Case::field(route, "logit_bias", json, expect));
    let refused = Expect::Refused(400, "logit_bias");
    push(&format!("{{\"{}\": -100}}", WIDE - 1), Expect::Taken);
    push(&format!("{{\"{WIDE}\": 1}}"), refused);
    for key in
        ["-1", "4294967296", "4294967295", "18446744073709551616", "1e3", "1.0", "+1", "007", " 1", "", "zqmarkerqz"]
    {
        push(&format!("{{\"{key}\": 1}}"), refused);
    }
    for value in ["101", "-101", "1e308", "-1e308", "\"1\"", "null", "[]", "{}", "true"] {
        push(&format!("{{\"0\": {value}}}"), refused);
    }
    for json in ["[]", "[[0, 1]]", "7", "\"zqmarkerqz\"", "true"] {
        push(json, refused);
    }
    push("{\"0\": NaN}", Expect::Refused(400, ""));
    push("{\"0\": 5e-324}", Expect::Taken);
    push("{}", Expect::Taken);
    let many: Vec<String> = (0..1025).map(|token| format!("\"{token}\": 1")).collect();
    push(&format!("{{{}}}", many.join(",")), refused);
}
