//! A route's answer, whole or in events, in one comparable form.

use serde_json::{Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    Chat,
    Completions,
    Responses,
    Messages,
}

impl Route {
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
        }
    }
}

/// All parts of an answer that must not depend on other requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub choices: Vec<Choice>,
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    pub text: String,
    pub token_ids: Vec<Value>,
    /// One entry per token. Numbers are in printed form: two that print alike are the same 32 bits.
    pub logprobs: Vec<Value>,
    pub prompt_logprobs: Vec<Value>,
    pub finish: String,
}

/// The reason why a reply is no answer.
#[derive(Debug, PartialEq)]
pub enum NoAnswer {
    /// The server reported in its stream that it failed.
    ErrorEvent(String),
    /// It ended without its last event.
    Truncated(String),
    /// It is not what the route documents.
    Garbled(String),
}

pub fn parse(route: Route, is_stream: bool, body: &[u8]) -> Result<Answer, NoAnswer> {
    let text = std::str::from_utf8(body).map_err(|_| NoAnswer::Garbled("not UTF-8".into()))?;
    if is_stream {
        return match route {
            Route::Chat | Route::Completions => openai_events(text),
            Route::Responses => response_events(text),
            Route::Messages => message_events(text),
        };
    }
    let whole: Value = serde_json::from_str(text).map_err(|error| NoAnswer::Garbled(format!("{error}: {text}")))?;
    let mut answer = Answer::default();
    match route {
        Route::Chat | Route::Completions => answer.openai_part(&whole)?,
        Route::Responses => answer.response(&whole)?,
        Route::Messages => answer.message(&whole)?,
    }
    Ok(answer)
}

/// The data of each event, in order.
fn events(text: &str) -> impl Iterator<Item = &str> {
    text.split("\n\n").filter_map(|event| event.lines().find_map(|line| line.strip_prefix("data: ")))
}

fn event(data: &str) -> Result<Value, NoAnswer> {
    let event: Value = serde_json::from_str(data).map_err(|error| NoAnswer::Garbled(format!("{error}: {data}")))?;
    let is_error = event.get("error").is_some_and(|error| !error.is_null()) || event["type"] == "error";
    if is_error { Err(NoAnswer::ErrorEvent(data.into())) } else { Ok(event) }
}

fn truncated(text: &str) -> NoAnswer {
    NoAnswer::Truncated(events(text).last().unwrap_or("no event at all").into())
}

fn openai_events(text: &str) -> Result<Answer, NoAnswer> {
    let mut answer = Answer::default();
    for data in events(text) {
        if data == "[DONE]" {
            return Ok(answer);
        }
        answer.openai_part(&event(data)?)?;
    }
    Err(truncated(text))
}

fn response_events(text: &str) -> Result<Answer, NoAnswer> {
    let (mut answer, mut said) = (Answer::default(), String::new());
    for data in events(text) {
        let event = event(data)?;
        match event["type"].as_str().unwrap_or_default() {
            "response.output_text.delta" => said.push_str(event["delta"].as_str().unwrap_or_default()),
            "response.failed" => return Err(NoAnswer::ErrorEvent(data.into())),
            "response.completed" | "response.incomplete" => {
                answer.response(&event["response"])?;
                if answer.choices[0].text != said {
                    return Err(NoAnswer::Garbled(format!(
                        "the events say {said:?}, their end {:?}",
                        answer.choices[0]
                    )));
                }
                return Ok(answer);
            }
            _ => {}
        }
    }
    Err(truncated(text))
}

fn message_events(text: &str) -> Result<Answer, NoAnswer> {
    let mut answer = Answer { choices: vec![Choice::default()], ..Answer::default() };
    for data in events(text) {
        let event = event(data)?;
        match event["type"].as_str().unwrap_or_default() {
            "content_block_delta" => {
                answer.choices[0].text.push_str(event["delta"]["text"].as_str().unwrap_or_default());
            }
            "message_delta" => {
                answer.choices[0].finish = event["delta"]["stop_reason"].as_str().unwrap_or_default().into();
                answer.anthropic_usage(&event["usage"]);
            }
            "message_stop" => return Ok(answer),
            _ => {}
        }
    }
    Err(truncated(text))
}

impl Answer {
    /// A whole answer of the OpenAI routes, or an event of one.
    fn openai_part(&mut self, part: &Value) -> Result<(), NoAnswer> {
        let garbled = || NoAnswer::Garbled(part.to_string());
        for choice in part["choices"].as_array().ok_or_else(garbled)? {
            let index = choice["index"].as_u64().ok_or_else(garbled)? as usize;
            if index >= self.choices.len() {
                self.choices.resize(index + 1, Choice::default());
            }
            self.choices[index].take(choice);
        }
        let prompt_logprobs = list(&part["prompt_logprobs"]);
        if let Some(first) = self.choices.first_mut() {
            first.prompt_logprobs.extend(prompt_logprobs);
        }
        if part["usage"].is_object() {
            self.prompt_tokens = number(&part["usage"]["prompt_tokens"]);
            self.completion_tokens = number(&part["usage"]["completion_tokens"]);
        }
        Ok(())
    }

    fn response(&mut self, response: &Value) -> Result<(), NoAnswer> {
        let output = response["output"].as_array().ok_or_else(|| NoAnswer::Garbled(response.to_string()))?;
        let parts = output.iter().flat_map(|item| list(&item["content"]));
        let text = parts.filter_map(|part| Some(part["text"].as_str()?.to_string())).collect();
        let finish = format!("{} {}", response["status"], response["incomplete_details"]["reason"]);
        self.choices = vec![Choice { text, finish, ..Choice::default() }];
        self.prompt_tokens = number(&response["usage"]["input_tokens"]);
        self.completion_tokens = number(&response["usage"]["output_tokens"]);
        Ok(())
    }

    fn message(&mut self, message: &Value) -> Result<(), NoAnswer> {
        let content = message["content"].as_array().ok_or_else(|| NoAnswer::Garbled(message.to_string()))?;
        let text = content.iter().filter_map(|block| block["text"].as_str()).collect();
        let finish = message["stop_reason"].as_str().unwrap_or_default().into();
        self.choices = vec![Choice { text, finish, ..Choice::default() }];
        self.anthropic_usage(&message["usage"]);
        Ok(())
    }

    /// Cached tokens are reported separately, and depend on earlier requests.
    fn anthropic_usage(&mut self, usage: &Value) {
        self.prompt_tokens = number(&usage["input_tokens"]) + number(&usage["cache_read_input_tokens"]);
        self.completion_tokens = number(&usage["output_tokens"]);
    }
}

impl Choice {
    fn take(&mut self, choice: &Value) {
        let texts = [&choice["message"]["content"], &choice["delta"]["content"], &choice["text"]];
        texts.iter().filter_map(|text| text.as_str()).for_each(|text| self.text.push_str(text));
        self.token_ids.extend(list(&choice["token_ids"]));
        self.prompt_logprobs.extend(list(&choice["prompt_logprobs"]));
        let logprobs = &choice["logprobs"];
        self.logprobs.extend(list(&logprobs["content"]));
        let columns = ["tokens", "token_logprobs", "top_logprobs", "text_offset"].map(|name| list(&logprobs[name]));
        let rows = (0..columns[0].len()).map(|row| columns.each_ref().map(|column| column.get(row).cloned()));
        self.logprobs.extend(rows.map(|row| json!(row)));
        if let Some(finish) = choice["finish_reason"].as_str() {
            self.finish = format!("{finish} {}", choice["stop_reason"]);
        }
    }
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}
