"""Chat prompts: hand-written templates over lists of topics."""

from __future__ import annotations

import random
from collections.abc import Iterator


def _split(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(";") if part.strip())


SUBJECTS = _split(
    """photosynthesis; black holes; plate tectonics; the water cycle; natural selection; the immune system; quantum
    entanglement; vaccines; antibiotics; climate change; the greenhouse effect; renewable energy; nuclear
    fusion; the periodic table; chemical bonds; acids and bases; Newton's laws; thermodynamics; entropy; general
    relativity; the speed of light; electricity and magnetism; superconductors; semiconductors; lasers; DNA
    replication; gene editing; stem cells; the nervous system; memory and learning; sleep; dreams; nutrition;
    vitamins; the human heart; the kidneys; viruses; bacteria; fungi; coral reefs; rainforests; deserts; ocean
    currents; volcanoes; earthquakes; hurricanes; the ozone layer; the Moon; Mars; Saturn's rings; comets; the
    Big Bang; dark matter; exoplanets; telescopes; satellites; the International Space Station; dinosaurs;
    fossils; human evolution; bees and pollination; whales; migrating birds; octopuses; ants; wolves; elephants;
    penguins; bats; trees; mosses; prime numbers; infinity; probability; statistics; calculus; geometry; graph
    theory; game theory; cryptography; algorithms; recursion; sorting algorithms; hash tables; databases;
    operating systems; compilers; computer networks; the Internet; web browsers; machine learning; neural
    networks; reinforcement learning; language models; computer vision; robotics; blockchain; cloud computing;
    open source software; version control; software testing; cybersecurity; passwords; privacy; the printing
    press; the steam engine; the Industrial Revolution; the Roman Empire; ancient Egypt; ancient Greece; the
    Silk Road; the Black Death; the Renaissance; the Reformation; the French Revolution; the American Civil War;
    the First World War; the Cold War; the fall of the Berlin Wall; decolonisation; the civil rights movement;
    women's suffrage; the Ottoman Empire; the Mongol Empire; the Ming dynasty; the Inca; the Vikings; feudalism;
    democracy; constitutions; human rights; the United Nations; the European Union; international trade;
    inflation; interest rates; supply and demand; monopolies; taxation; stock markets; central banks;
    unemployment; globalisation; microfinance; behavioural economics; the base rate fallacy; confirmation bias;
    cognitive dissonance; motivation; habits; happiness; grief; empathy; child development; bilingualism; the
    origin of language; writing systems; grammar; etymology; poetry; Shakespeare; the novel; fairy tales; myths;
    philosophy of mind; free will; utilitarianism; stoicism; existentialism; ethics; logic; the scientific
    method; art history; impressionism; cubism; photography; architecture; Gothic cathedrals; bridges; music
    theory; jazz; opera; folk music; the symphony; ballet; cinema; theatre; chess; football; the Olympic Games;
    cycling; swimming; marathon running; yoga; meditation; cooking; baking bread; cheese; coffee; tea;
    chocolate; spices; wine; fermentation; gardening; composting; beekeeping; knitting; woodworking; pottery;
    recycling; public transport; electric cars; aviation; sailing; railways; urban planning; housing; museums;
    libraries; education; online learning; homework; exams; teamwork; leadership; negotiation; public speaking;
    time management; project management; remote work; entrepreneurship; marketing; branding; customer service;
    journalism; social media; advertising; copyright; patents; voting systems; artificial intelligence in
    medicine; telemedicine; mental health; first aid; allergies; exercise; ageing; water purification; soil;
    agriculture; irrigation; fishing; forests; endangered species; national parks; zoos; pets; dogs; cats;
    horses; parrots; aquariums; mathematics in nature; the golden ratio; optical illusions; colour theory;
    fonts; maps; calendars; time zones; clocks; currencies; weights and measures"""
)
PLACES = _split(
    """Japan; Iceland; Morocco; Peru; Kenya; Norway; Italy; Vietnam; Canada; New Zealand; Portugal; Turkey; Mexico;
    India; Greece; Scotland; Chile; Egypt; Thailand; South Africa; Paris; Kyoto; Istanbul; Lisbon; Prague;
    Vienna; Buenos Aires; Cape Town; Sydney; Montreal; Edinburgh; Barcelona; Rome; Seoul; Singapore; Hawaii;
    Alaska; Patagonia; the Alps; Tuscany; Bali; Amsterdam; Dublin; Copenhagen; Budapest; Marrakesh; Havana;
    Cusco; Zanzibar; the Scottish Highlands"""
)
PEOPLE = _split(
    """a lighthouse keeper; a retired astronaut; a young violinist; a clumsy wizard; a detective; a talking cat; a
    robot gardener; a lonely dragon; a street artist; a time traveller; a deep-sea diver; a village baker; a
    lost explorer; two rival chefs; a librarian; a night-shift nurse; an old fisherman; a shy inventor; a
    princess who hates balls; a ghost who is afraid of people; a taxi driver; a chess prodigy; a mountain guide;
    a beekeeper; a clockmaker; a sailor; a schoolteacher; a mapmaker; an AI that wants to paint; a small-town
    mayor; a refugee; a postman; a circus acrobat; a grandmother; a spy; a farmer; a knight without a sword; a
    botanist; twins; a translator; a musician; a banker"""
)
SETTINGS = _split(
    """a mysterious letter; an abandoned railway station; a storm at sea; a city under the ocean; the last day of
    summer; a forgotten library; a broken clock; a journey across the desert; a hidden door; a long winter; a
    train that never stops; a garden on the Moon; a stolen painting; an unexpected friendship; a festival of
    lanterns; a power cut; a haunted hotel; a small island; a message in a bottle; a secret recipe; a lost dog;
    a magic mirror; a space station; a rainy night; a family secret; a race against time; an old photograph; a
    village without colours; a dream that comes true; a market full of strange things; a promise made long ago;
    a map with no names; a strange new neighbour"""
)
SKILLS = _split(
    """learn a new language; play the guitar; train for a marathon; bake sourdough bread; save money; build a budget;
    write a novel; start a small business; grow tomatoes; fix a flat tyre; prepare for a job interview; give a
    speech; sleep better; read more books; make new friends; take better photographs; learn to draw; clean an
    oven; organise a desk; plan a wedding; move to another city; adopt a dog; train a puppy; reduce food waste;
    make coffee; tie a bow tie; remove a wine stain; paint a room; write a CV; ask for a raise; resolve a
    conflict; study for exams; stop procrastinating; learn to swim; set up a home network; build a website;
    create a spreadsheet; back up a computer; choose a laptop; learn Python; debug a program; contribute to open
    source; start a podcast; write a poem; brew beer; make pasta; cook rice; pack for a hike; camp in the rain;
    change a light switch; unclog a drain; sharpen a knife; sew a button; iron a shirt; host a dinner party;
    entertain children; write a thank-you note; start meditating; build muscle; lose weight safely; improve
    posture; deal with stress; manage a team; run a meeting; give feedback; learn to code; prepare a garden for
    winter; keep bees; start composting; choose a bicycle; learn chess; solve a Rubik's cube; juggle"""
)
PAIRS = _split(
    """cats and dogs; tea and coffee; trains and planes; books and films; Python and Java; C and Rust; SQL and NoSQL
    databases; capitalism and socialism; renting and buying a home; summer and winter; cities and the
    countryside; running and swimming; supervised and unsupervised learning; TCP and UDP; mitosis and meiosis;
    weather and climate; frogs and toads; alligators and crocodiles; viruses and bacteria; stocks and bonds;
    threads and processes; lists and tuples; stacks and queues; plant cells and animal cells; fission and
    fusion; mean and median; poetry and prose; oil painting and watercolour; the violin and the cello; classical
    and operant conditioning; remote and office work; laptops and desktops; leadership and management; debit and
    credit cards; analog and digital signals; comets and asteroids; speed and velocity; mass and weight;
    introverts and extroverts; butter and margarine; solar and wind power"""
)
ROLES = _split(
    """a pirate captain; a medieval knight; Sherlock Holmes; a patient mathematics teacher; a travel agent; a life
    coach; a doctor; a friendly barista; a stand-up comedian; a news anchor; a chef with a Michelin star; a
    career adviser; a historian; an alien who visits Earth; a robot from the future; a museum guide; a sports
    commentator; a gardener; a philosopher; a software architect; a job interviewer; an English teacher; a poet;
    a financial adviser; a psychologist; a librarian; a mechanic; a wise old tree; a personal trainer; a fantasy
    novelist; a customer service agent; a lawyer"""
)
RECIPIENTS = _split(
    """my landlord; my boss; a colleague; a customer; my professor; an old friend; my neighbour; a hotel; an airline; a
    potential employer; my team; a supplier; the school; my grandmother; the city council; a recruiter; an
    investor"""
)
MATTERS = _split(
    """asking for a day off; apologising for a late reply; complaining about a broken heater; thanking for a gift;
    inviting to a birthday party; asking for a refund; proposing a meeting; announcing a new product; declining
    an invitation; asking for a recommendation; reporting a delay; introducing myself; asking for feedback;
    cancelling a subscription; following up after an interview; congratulating on a promotion; requesting an
    extension; offering help with moving house; asking to borrow a tent; resigning from a job; reminding about
    an unpaid invoice"""
)
TRAITS = _split(
    "short; funny; formal; friendly; dramatic; sad; hopeful; simple; vivid; suspenseful; romantic; witty; calm"
)
LENGTHS = _split(
    "in one paragraph; in two paragraphs; in about 100 words; in about 200 words; in 300 words; in three sentences; in"
    " detail; briefly; in simple words; with an example; step by step; in bullet points; for a beginner; for a child"
)
AUDIENCES = _split(
    "a ten-year-old; a beginner; a university student; an expert; my grandmother; a busy manager; a classroom; a"
    " curious teenager; a software engineer; a tourist"
)
FORMS = _split(
    "a poem; a haiku; a limerick; a song; a short story; a fairy tale; a dialogue; a speech; a diary entry; a letter;"
    " a blog post; a news article; a product review; a fable; a riddle; a monologue; an advertisement; a film synopsis"
)
DEVICES = _split(
    "Use a metaphor in each sentence.; End with a question.; Do not use the word 'very'.; Use only short sentences.;"
    " Write it in the second person.; Include a surprising twist.; Use exactly four sentences.; Add a title.;"
    " Make it rhyme.; Mention the weather.; Answer in JSON.; Use a numbered list.; Use a table.;"
    " Write in the past tense."
)
FOLLOWUPS = _split(
    """Make it shorter.; Now rewrite it for a child.; Summarize your answer in one sentence.; Give me an example.; Can
    you explain the last point?; Rewrite it in a more formal tone.; Turn that into bullet points.; What are the
    drawbacks?; Add a title.; What would a critic say?; Can you make it funnier?; Now write it as a poem.; Tell
    me more.; Why?; List three questions a reader might ask.; What is the most important part?; Translate the
    first sentence into French.; Continue.; How sure are you?; Give three alternatives."""
)

# Kinds of prompt, each with its share within the chat prompts.
TEMPLATES: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    (
        "explain",
        0.30,
        (
            "Explain {subject} {length}.",
            "What is the history of {subject}?",
            "Explain {subject} to {audience}.",
            "Why does {subject} matter?",
            "What are the most important facts about {subject}?",
            "Write an essay about {subject} {length}.",
            "List five interesting facts about {subject}.",
            "What are common misconceptions about {subject}?",
            "How has our understanding of {subject} changed over time?",
            "Give an overview of {subject} {length}.",
            "What should {audience} know about {subject}?",
            "Describe the connection between {subject} and {subject2}.",
            "What questions about {subject} are still open?",
            "Create a quiz with five questions about {subject}, with answers.",
            "Write an introduction for an article on {subject}. {device}",
            "What are the advantages and disadvantages of {subject}?",
            "Design a one-hour lesson about {subject} for {audience}.",
            "Tell me about {subject}.",
            "How would you explain the importance of {subject} to {audience}? {device}",
            "Outline a presentation on {subject} with a short note for each slide.",
            "Suggest three books or films about {subject} and say why.",
            "Argue for and against this claim: {subject} will matter more in fifty years than today.",
        ),
    ),
    (
        "write",
        0.26,
        (
            "Write {form} about {person} and {setting}.",
            "Write a {trait} story about {person} and {setting}.",
            "Write the opening paragraph of a {trait} story with {setting}. {device}",
            "Write {form} about {subject}.",
            "Write a {trait} poem about {setting}.",
            "Describe {setting} through the eyes of {person}.",
            "Invent a conversation between {person} and {person2} about {subject}.",
            "Write {form} in which {person} discovers {setting}. {device}",
            "Give me ten titles for a {trait} book about {person}.",
            'Continue this story: "It all began with {setting}. Nobody had expected {person} to be there."',
            "Write {form} for {audience} that mentions {setting} and {subject}.",
            "Create a character sketch of {person}, {length}.",
            "Write a {trait} travel blog post about {place}.",
            "Write a {trait} scene set in {place} with {person}.",
        ),
    ),
    (
        "advise",
        0.16,
        (
            "How can I {skill}?",
            "Give me a step-by-step guide to {skill}.",
            "I want to {skill}, but I have very little time. What should I do?",
            "What are the most common mistakes people make when they {skill}?",
            "Make a four-week plan to {skill}.",
            "What do I need in order to {skill}? Give a checklist.",
            "My friend wants to {skill} and {skill2}. Which should come first?",
            "Give five tips for people who want to {skill}. {device}",
            "Is it worth it to {skill}? {length}, please.",
            "How long does it take to {skill}?",
        ),
    ),
    (
        "compare",
        0.07,
        (
            "Compare {pair}.",
            "What is the difference between {pair}?",
            "Compare {pair} {length}.",
            "{pair}: which would you recommend to {audience}, and why?",
            "Make a table that compares {pair}.",
            "Explain the difference between {pair} to {audience}. {device}",
        ),
    ),
    (
        "roleplay",
        0.09,
        (
            "Pretend to be {role}. What do you think about {subject}?",
            "You are {role}. Tell me about your day. {device}",
            "Act as {role} and explain how to {skill}.",
            "Imagine you are {role} and meet {person}. Write what you say to each other.",
            "Answer as {role}: what is the meaning of {subject}?",
            "I want you to act as {role}. My first question is: how do I {skill}?",
            "You are {role} visiting {place}. Describe what you see.",
        ),
    ),
    (
        "letters",
        0.06,
        (
            "Write an email to {recipient} {matter}.",
            "Write a {trait} letter to {recipient} {matter}.",
            "Draft a message to {recipient} {matter}. {device}",
            "Help me write to {recipient}: I am {matter}. Keep it {trait}.",
            "Write a professional email to {recipient} {matter}, signed by {name}.",
        ),
    ),
    (
        "travel",
        0.06,
        (
            "Plan a {n}-day trip to {place}.",
            "What should I know before I visit {place}?",
            "What is the food like in {place}? Recommend {n} dishes.",
            "Describe {place} {length}.",
            "What is the best time of year to visit {place}, and why?",
            "Suggest a cheap weekend in {place} for {audience}.",
            "I have {n} days and like {subject}. Should I go to {place} or {place2}?",
            "Write a packing list for {n} days in {place}.",
        ),
    ),
)
GREETINGS = _split(
    "Hi!; Hello.; Hey, how are you?; Good morning!; Who are you?; What can you do?; Thanks!; Tell me a joke."
)


def _fields(rng: random.Random) -> dict[str, object]:
    subject, subject2 = rng.sample(SUBJECTS, 2)
    place, place2 = rng.sample(PLACES, 2)
    person, person2 = rng.sample(PEOPLE, 2)
    skill, skill2 = rng.sample(SKILLS, 2)
    return {
        "subject": subject, "subject2": subject2, "place": place, "place2": place2,
        "person": person, "person2": person2,
        "skill": skill, "skill2": skill2, "pair": rng.choice(PAIRS), "role": rng.choice(ROLES),
        "setting": rng.choice(SETTINGS), "recipient": rng.choice(RECIPIENTS), "matter": rng.choice(MATTERS),
        "trait": rng.choice(TRAITS), "length": rng.choice(LENGTHS), "audience": rng.choice(AUDIENCES),
        "form": rng.choice(FORMS), "device": rng.choice(DEVICES), "n": rng.randint(2, 10),
        "name": rng.choice(("Anna", "Tom", "Mrs Lee", "Dr Okafor", "Luis", "the tenants of number 12")),
    }  # fmt: skip


def chat(rng: random.Random) -> Iterator[list[str]]:
    """Questions, writing tasks, advice and role play; one in eight goes on for a second turn."""
    shares = [share for _, share, _ in TEMPLATES]
    yield from ([greeting] for greeting in GREETINGS)
    while True:
        (_, _, templates) = rng.choices(TEMPLATES, shares)[0]
        text = rng.choice(templates).format(**_fields(rng))
        text = text[0].upper() + text[1:]
        if rng.random() < 0.08:
            text = (
                rng.choice(("Please help me. ", "Quick question: ", "hey, ", "Hello! ", "I have a task for you. "))
                + text
            )
        yield [text] if rng.random() < 0.875 else [text, rng.choice(FOLLOWUPS)]
